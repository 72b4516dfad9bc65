"""Calls of the agent's file services, through the core's relay: from arguments to requests and back, without I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC
from typing import IO, Any

from google.protobuf.message import Message

from sandgate.client.limits import request_limit
from sandgate.client.records import EntryInfo, FileType
from sandgate.client.steps import Ask, Cut, Metadata, Method, Open, Read, Steps, Stream, Upload
from sandgate_api.agent.v1 import agent_pb2
from sandgate_api.envd.v1 import filesystem_pb2 as pb
from sandgate_errors import AlreadyExists, InvalidArgument, NotFound, SandboxNotFound

__all__ = ["Content", "Files"]

#: Bytes of content in one message.
_PIECE = 256 * 1024

_FILESYSTEM = "/sandgate_api.envd.v1.Filesystem/"
_AGENT = "/sandgate_api.agent.v1.Agent/"
_STAT = Method(_FILESYSTEM + "Stat", pb.StatResponse)
_LIST_DIR = Method(_FILESYSTEM + "ListDir", pb.ListDirResponse)
_MAKE_DIR = Method(_FILESYSTEM + "MakeDir", pb.MakeDirResponse)
_MOVE = Method(_FILESYSTEM + "Move", pb.MoveResponse)
_REMOVE = Method(_FILESYSTEM + "Remove", pb.RemoveResponse)
_READ_FILE = Method(_AGENT + "ReadFile", agent_pb2.ReadFileResponse)
_WRITE_FILE = Method(_AGENT + "WriteFile", agent_pb2.WriteFileResponse)

_TYPES = {
    pb.FILE_TYPE_FILE: FileType.FILE,
    pb.FILE_TYPE_DIRECTORY: FileType.DIRECTORY,
    pb.FILE_TYPE_SYMLINK: FileType.SYMLINK,
}

#: What a file is written from. An open file is read to its end, in pieces.
Content = str | bytes | IO[bytes]


@dataclass(frozen=True, kw_only=True)
class Files:
    """The file services of one sandbox's agent, for one acting user (None: the default one)."""

    sandbox_id: str
    user: str | None = None

    @property
    def metadata(self) -> Metadata:
        if not (self.sandbox_id.isascii() and self.sandbox_id.isprintable()):
            raise InvalidArgument("a sandbox id has letters and digits only")
        if self.user is None:
            return (("sandbox-id", self.sandbox_id),)
        return (("sandbox-id", self.sandbox_id), ("acting-user-bin", self.user.encode("utf-8", "surrogateescape")))

    def open(self, path: str) -> Steps[Stream]:
        """The file's content as a stream, for :meth:`piece`."""
        stream: Stream = yield Open(
            method=_READ_FILE, request=agent_pb2.ReadFileRequest(path=_checked(path)), metadata=self.metadata
        )
        return stream

    def piece(self, stream: Stream, timeout: float | None) -> Steps[bytes | None]:
        """The next bytes; None at the end of the file."""
        while (reply := (yield Read(stream, request_limit(timeout)))) is not None:
            if reply.WhichOneof("part") == "data":
                data: bytes = reply.data
                return data
        return None

    def read(self, path: str, timeout: float | None) -> Steps[bytes]:
        """The whole content. ``timeout`` is for each piece: how long a large file takes is no fault."""
        content = bytearray()
        stream = yield from self.open(path)
        try:
            while (data := (yield from self.piece(stream, timeout))) is not None:
                content += data
        finally:
            stream.close()
        return bytes(content)

    def write(self, path: str, content: Content, timeout: float | None) -> Steps[EntryInfo]:
        """Written in place. ``timeout`` None: none, since how long a large file takes is no fault."""
        source = _Source(content)
        try:
            reply = yield Upload(
                method=_WRITE_FILE,
                requests=source.requests(_checked(path)),
                blocking=not isinstance(content, str | bytes),
                metadata=self.metadata,
                timeout=None if timeout is None else request_limit(timeout),
            )
        except Cut as error:
            raise Cut(f"the connection was lost while '{path}' was written: part of it may be there") from error
        if source.failure is not None:
            raise source.failure
        return _entry(reply.entry)

    def list(self, path: str, depth: int, timeout: float | None) -> Steps[list[EntryInfo]]:
        if not 1 <= depth < 1 << 32:
            raise InvalidArgument(f"depth counts directories from 1, not {depth}")
        reply = yield self._ask(_LIST_DIR, pb.ListDirRequest(path=_checked(path), depth=depth), timeout)
        return [_entry(entry) for entry in reply.entries]

    def get_info(self, path: str, timeout: float | None) -> Steps[EntryInfo]:
        reply = yield self._ask(_STAT, pb.StatRequest(path=_checked(path)), timeout)
        return _entry(reply.entry)

    def exists(self, path: str, timeout: float | None) -> Steps[bool]:
        try:
            yield from self.get_info(path, timeout)
        except SandboxNotFound:
            raise
        except NotFound:
            return False
        return True

    def make_dir(self, path: str, timeout: float | None) -> Steps[bool]:
        """Whether it was made; False when it was there."""
        try:
            yield self._ask(_MAKE_DIR, pb.MakeDirRequest(path=_checked(path)), timeout)
        except AlreadyExists:
            return False
        return True

    def rename(self, old: str, new: str, timeout: float | None) -> Steps[EntryInfo]:
        request = pb.MoveRequest(source=_checked(old), destination=_checked(new))
        reply = yield self._ask(_MOVE, request, timeout)
        return _entry(reply.entry)

    def remove(self, path: str, timeout: float | None) -> Steps[None]:
        yield self._ask(_REMOVE, pb.RemoveRequest(path=_checked(path)), timeout)

    def _ask(self, method: Method[Any], request: Message, timeout: float | None) -> Ask:
        return Ask(method=method, request=request, metadata=self.metadata, timeout=request_limit(timeout))


def _checked(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InvalidArgument("the path contains what UTF-8 cannot carry") from None
    return path


class _Source:
    """What a file is written from, as requests."""

    def __init__(self, content: Content) -> None:
        self._content = content
        #: Why they ended early. gRPC would swallow it, or make a cancellation of it.
        self.failure: Exception | None = None

    def requests(self, path: str) -> Iterator[Message]:
        yield agent_pb2.WriteFileRequest(header=agent_pb2.WriteFileRequest.Header(path=path))
        try:
            for data in _pieces(self._content):
                yield agent_pb2.WriteFileRequest(data=data)
        except Exception as error:
            self.failure = error


def _pieces(content: Content) -> Iterator[bytes]:
    if isinstance(content, str | bytes):
        whole = memoryview(content.encode() if isinstance(content, str) else content)
        for start in range(0, len(whole), _PIECE):
            yield bytes(whole[start : start + _PIECE])
        return
    while data := content.read(_PIECE):
        if not isinstance(data, bytes):
            raise InvalidArgument("a file to write from must be opened in binary mode")
        yield data


def _entry(entry: pb.EntryInfo) -> EntryInfo:
    return EntryInfo(
        name=entry.name,
        path=entry.path,
        type=_TYPES.get(entry.type, FileType.UNKNOWN),
        size=entry.size,
        mode=entry.mode,
        permissions=entry.permissions,
        owner=entry.owner,
        group=entry.group,
        modified_at=entry.modified_time.ToDatetime(UTC),
        symlink_target=entry.symlink_target if entry.HasField("symlink_target") else None,
    )
