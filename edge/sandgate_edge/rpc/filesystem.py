"""``filesystem.Filesystem``, the service behind the SDKs' file entries; answered by the agent's ``services/filesystem.py``.

File content does not pass here but through ``rest/files.py``. Limits on listings are the gateway's and not the agent's: the
contract knows none (F24), and whoever runs a gateway may set some.
"""

from __future__ import annotations

from dataclasses import replace

from sandgate_api.envd.v1 import filesystem_pb2
from sandgate_edge.agents import Agents
from sandgate_edge.rpc.service import Method, methods_of
from sandgate_edge.settings import Settings
from sandgate_errors import InvalidArgument

__all__ = ["METHODS"]


def _check_depth(settings: Settings, request: filesystem_pb2.ListDirRequest) -> None:
    if settings.max_list_depth and request.depth > settings.max_list_depth:
        raise InvalidArgument(f"the depth of a listing may be at most {settings.max_list_depth} on this gateway")


def _check_entries(settings: Settings, reply: filesystem_pb2.ListDirResponse) -> None:
    if settings.max_list_entries and len(reply.entries) > settings.max_list_entries:
        raise InvalidArgument(f"a listing may have at most {settings.max_list_entries} entries on this gateway")


def _limited(method: Method) -> Method:
    if method.path.endswith("/ListDir"):
        return replace(method, check_request=_check_depth, check_reply=_check_entries)
    return method


METHODS = tuple(
    map(
        _limited,
        methods_of(
            "filesystem.Filesystem", filesystem_pb2.DESCRIPTOR.services_by_name["Filesystem"], Agents.filesystem
        ),
    )
)
