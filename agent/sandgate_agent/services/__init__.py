"""Protobuf to domain and back: one module per service of the agent, nothing else decided here."""

from sandgate_agent.services.agent import AgentService
from sandgate_agent.services.filesystem import FilesystemService
from sandgate_agent.services.process import ProcessService

__all__ = ["AgentService", "FilesystemService", "ProcessService"]
