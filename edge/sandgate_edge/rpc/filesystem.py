"""``filesystem.Filesystem``, the service behind the SDKs' file entries; answered by the agent's ``services/filesystem.py``.

File content does not pass here but through ``rest/files.py``.
"""

from __future__ import annotations

from sandgate_api.envd.v1 import filesystem_pb2
from sandgate_edge.agents import Agents
from sandgate_edge.rpc.service import methods_of

__all__ = ["METHODS"]

METHODS = methods_of(
    "filesystem.Filesystem", filesystem_pb2.DESCRIPTOR.services_by_name["Filesystem"], Agents.filesystem
)
