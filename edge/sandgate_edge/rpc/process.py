"""``process.Process``, the service behind the SDKs' commands and terminals; answered by the agent's ``services/process.py``.

A table only: how each kind of call works stands in ``unary.py``, ``server_stream.py`` and ``client_stream.py``.
"""

from __future__ import annotations

from sandgate_api.envd.v1 import process_pb2
from sandgate_edge.agents import Agents
from sandgate_edge.rpc.service import methods_of

__all__ = ["METHODS"]

METHODS = methods_of("process.Process", process_pb2.DESCRIPTOR.services_by_name["Process"], Agents.process)
