"""The gRPC services of the core: messages to domain and back, nothing else."""

from sandgate_core.services.audit import AuditService
from sandgate_core.services.edges import EdgeService
from sandgate_core.services.keys import KeyService
from sandgate_core.services.logs import LogService
from sandgate_core.services.peers import PeerService
from sandgate_core.services.relay import Relay
from sandgate_core.services.sandboxes import SandboxService
from sandgate_core.services.teams import TeamService

__all__ = [
    "AuditService",
    "EdgeService",
    "KeyService",
    "LogService",
    "PeerService",
    "Relay",
    "SandboxService",
    "TeamService",
]
