"""``Sandbox.files``: files of a sandbox, for callers that may block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, overload

from sandgate.client.blocking import Core
from sandgate.client.file_calls import Content, Files
from sandgate.client.records import EntryInfo

__all__ = ["Filesystem"]


class Filesystem:
    """Reads and changes the files of one sandbox.

    ``user`` is who acts (None: the default user); a relative path starts at that user's home. ``request_timeout`` is in
    seconds (None: 60; 0: no limit). Every method raises SandboxException or one of its kinds: NotFoundException when the
    path or the sandbox does not exist.
    """

    def __init__(self, core: Core, sandbox_id: str) -> None:
        self._core = core
        self._sandbox_id = sandbox_id

    @overload
    def read(
        self,
        path: str,
        format: Literal["text"] = "text",
        *,
        user: str | None = None,
        request_timeout: float | None = None,
    ) -> str: ...

    @overload
    def read(
        self,
        path: str,
        format: Literal["bytes"],
        *,
        user: str | None = None,
        request_timeout: float | None = None,
    ) -> bytes: ...

    @overload
    def read(
        self,
        path: str,
        format: Literal["stream"],
        *,
        user: str | None = None,
        request_timeout: float | None = None,
    ) -> Iterator[bytes]: ...

    def read(
        self,
        path: str,
        format: Literal["text", "bytes", "stream"] = "text",  # noqa: A002
        *,
        user: str | None = None,
        request_timeout: float | None = None,
    ) -> str | bytes | Iterator[bytes]:
        """The content: as UTF-8 text (what is none becomes U+FFFD), as bytes, or piece by piece.

        ``request_timeout`` is the time for each piece.
        """
        if format == "stream":
            return self._stream(path, user, request_timeout)
        content = self._core.run(self._of(user).read(path, request_timeout))
        return content if format == "bytes" else content.decode("utf-8", "replace")

    def _stream(self, path: str, user: str | None, request_timeout: float | None) -> Iterator[bytes]:
        files = self._of(user)
        stream = self._core.run(files.open(path))
        try:
            while (data := self._core.run(files.piece(stream, request_timeout))) is not None:
                yield data
        finally:
            stream.close()

    def write(
        self, path: str, data: Content, *, user: str | None = None, request_timeout: float | None = None
    ) -> EntryInfo:
        """Write a file in place, and make the directories above it. ``request_timeout`` None: no limit."""
        return self._core.run(self._of(user).write(path, data, request_timeout))

    def list(
        self, path: str, depth: int = 1, *, user: str | None = None, request_timeout: float | None = None
    ) -> list[EntryInfo]:
        """The entries below a directory, ``depth`` directories deep."""
        return self._core.run(self._of(user).list(path, depth, request_timeout))

    def exists(self, path: str, *, user: str | None = None, request_timeout: float | None = None) -> bool:
        """Whether there is anything at the path."""
        return self._core.run(self._of(user).exists(path, request_timeout))

    def get_info(self, path: str, *, user: str | None = None, request_timeout: float | None = None) -> EntryInfo:
        """What is at the path."""
        return self._core.run(self._of(user).get_info(path, request_timeout))

    def make_dir(self, path: str, *, user: str | None = None, request_timeout: float | None = None) -> bool:
        """Make a directory and those above it; False when it is there already."""
        return self._core.run(self._of(user).make_dir(path, request_timeout))

    def rename(
        self, old_path: str, new_path: str, *, user: str | None = None, request_timeout: float | None = None
    ) -> EntryInfo:
        """Move a file or directory; what it is at its new place."""
        return self._core.run(self._of(user).rename(old_path, new_path, request_timeout))

    def remove(self, path: str, *, user: str | None = None, request_timeout: float | None = None) -> None:
        """Remove a file, or a directory and everything in it."""
        self._core.run(self._of(user).remove(path, request_timeout))

    def _of(self, user: str | None) -> Files:
        return Files(sandbox_id=self._sandbox_id, user=user)
