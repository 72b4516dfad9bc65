"""Requests about files: whose they are, how paths are written, what may be uploaded, how entries look (K28 to K34)."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from sandgate_api.envd.v1 import filesystem_pb2
from sandgate_errors import InvalidArgument
from sandgate_plugin_api import AgentRequest

__all__ = ["USER", "accepted_query", "check_upload", "clean_message", "is_about_files", "plain_answer"]

#: Who acts, always.
USER = "user"
_HOME = "/home/user"
_SERVICE = "/filesystem.Filesystem/"
_PATHS = ("path", "source", "destination")


def is_about_files(request: AgentRequest) -> bool:
    """Whether a request of the data plane is one about files."""
    path = request.route.partition(" ")[2]
    return path == "/files" or path.startswith(_SERVICE)


def accepted_query(request: AgentRequest) -> Mapping[str, Sequence[str]]:
    """The query of ``/files``. Raises InvalidArgument (K28, K29)."""
    query = request.query
    if any(name not in {"", USER} for name in query.get("username", ())):
        raise InvalidArgument(f"username must be '{USER}' or absent")
    given = query.get("path")
    if given is None and request.route.startswith("POST "):
        # Each part of the form says by its file name where it goes.
        pass
    elif not given or not given[0]:
        raise InvalidArgument("path must not be empty")
    if "signature" in query:
        # Whoever has signed it has signed these words, as they are.
        return query
    cleaned = {} if given is None else {"path": [_clean(given[0])]}
    return {**query, "username": [USER], **cleaned}


def check_upload(request: AgentRequest) -> None:
    """Raises InvalidArgument for what is no form (K30)."""
    if (request.header("Content-Type") or "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise InvalidArgument("an upload must be multipart/form-data")


def clean_message(message: Any) -> Any:
    """A message of the file service with its paths as ROCK reads them. Raises InvalidArgument."""
    if isinstance(message, Message):
        for name in _PATHS:
            if name in message.DESCRIPTOR.fields_by_name:
                setattr(message, name, _clean(getattr(message, name)))
    return message


def plain_answer(message: Any) -> Any:
    """An answer without metadata (K34); a listing by path (K32)."""
    if isinstance(message, list):
        return [{name: item[name] for name in ("name", "path", "type")} for item in message]
    if isinstance(message, filesystem_pb2.ListDirResponse):
        entries = sorted(message.entries, key=lambda entry: entry.path)
        for entry in entries:
            entry.metadata.clear()
        return filesystem_pb2.ListDirResponse(entries=entries)
    if isinstance(message, Message) and "entry" in message.DESCRIPTOR.fields_by_name and message.HasField("entry"):
        message.entry.metadata.clear()  # type: ignore[attr-defined]
    return message


def _clean(path: str) -> str:
    """Absolute, without `.` and `..`."""
    if not path:
        raise InvalidArgument("path must not be empty")
    if path == "~" or path.startswith("~/"):
        path = path[1:].lstrip("/")
    # normpath keeps two leading slashes, which POSIX leaves open.
    return "/" + posixpath.normpath(posixpath.join(_HOME, path)).lstrip("/")
