"""Open files that the agents of this machine hand over, so that their content passes neither the agent nor gRPC.

The agent's side, and the form of question and answer: ``agent/sandgate_agent/handover.py`` (docs/architecture.md, "Large
downloads"). No file is the usual outcome elsewhere: agents of other hosts, behind a relay or of an earlier version have no
such socket. Its caller then goes on with ``ReadFile``, which it has begun before.

What comes may have been sent by the sandbox's own code. So a descriptor must be what the agent has told in both ways, and
whatever is done with it, closing included, is done in threads of its own and by whom has time: a file system may answer
when it likes, or never. One sandbox can hold a few of these threads and no more.
"""

from __future__ import annotations

import array
import asyncio
import ctypes
import fcntl
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog
from google.protobuf.message import DecodeError

from sandgate_api.agent.v1 import agent_pb2
from sandgate_edge.core_client import Located

__all__ = ["HandedFile", "Handover"]

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

T = TypeVar("T")

_SUFFIX = ".files"
_UNIX = "unix:"
_THREADS = 32
#: Files of one sandbox at once; the next ones come as a stream.
_MOST_OF_ONE_AGENT = 8
#: An agent that is busy for longer had better send the stream that it has begun.
_ANSWER_SECONDS = 2.0
_LARGEST_ANSWER = 16 * 1024
#: One is expected. Room for some more, so that an agent that sends too many is seen to.
_ROOM_FOR_FDS = socket.CMSG_SPACE(8 * array.array("i").itemsize)
#: File systems of this machine's kernel (statfs(2)): ext, XFS, Btrfs, tmpfs, overlayfs, F2FS, ZFS, bcachefs. Others may
#: have somebody behind them who decides whether to answer, or files whose size says nothing.
_OF_THE_KERNEL = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0xF2F52010, 0x2FC12FC1, 0xCA451A4E})
_libc = ctypes.CDLL(None, use_errno=True)


class Handover:
    """One per edge process."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="handed-files")
        self._held: Counter[str] = Counter()

    async def take(
        self, located: Located, *, user: str | None, header: agent_pb2.ReadFileResponse.Header
    ) -> HandedFile | None:
        """The file that ``ReadFile`` has described, unchanged since; None where it is not to be had. The caller closes it."""
        address = _address(located)
        if address is None or self._held[address] >= _MOST_OF_ONE_AGENT:
            return None
        connection = _connect(address, token=located.agent_token, user=user, path=header.path)
        if connection is None:
            return None
        handed = HandedFile(connection, self._threads, released=self._hold(address))
        try:
            if await handed.receive(header, within=_ANSWER_SECONDS):
                return handed
        except (OSError, TimeoutError, DecodeError) as error:
            # Also: an agent that is paused, or over its number of files. It is not known to be at fault.
            _log.debug("no file was handed over", sandbox=located.sandbox.id, reason=repr(error))
        except _NotAsTold as error:
            _log.warning("an agent handed over what it should not", sandbox=located.sandbox.id, reason=str(error))
        except BaseException:
            handed.close()
            raise
        handed.close()
        return None

    def close(self) -> None:
        """Does not wait: threads may hang, and end with the process."""
        self._threads.shutdown(wait=False)

    def _hold(self, address: str) -> Callable[[], None]:
        self._held[address] += 1

        def released() -> None:
            self._held[address] -= 1
            if not self._held[address]:
                del self._held[address]

        return released


class HandedFile:
    """One file, and the connection on which it came, which lasts as long as its sandbox."""

    def __init__(self, connection: socket.socket, threads: ThreadPoolExecutor, *, released: Callable[[], None]) -> None:
        self._connection = connection
        self._threads = threads
        self._released = released
        self._fds: list[int] = []
        self._working: asyncio.Future[Any] | None = None
        self._loop = asyncio.get_running_loop()
        #: Something came, or the end: the agent is not to say anything but its file.
        self._told = self._loop.create_future()
        self._loop.add_reader(connection, self._tell)

    async def receive(self, header: agent_pb2.ReadFileResponse.Header, *, within: float) -> bool:
        """Whether the file came, as told. Raises OSError, TimeoutError, DecodeError, _NotAsTold."""
        async with asyncio.timeout(within):
            await self._told
        answer = self._receive()
        if not answer and not self._fds:
            return False
        if len(self._fds) != 1:
            raise _NotAsTold(f"{len(self._fds)} descriptors")
        if agent_pb2.ReadFileResponse.Header.FromString(answer) != header:
            # It has been changed or replaced meanwhile, and the beginning of the other one is on its way.
            return False
        if fault := await self.call(lambda fd: _fault(fd, header.size), within=within):
            raise _NotAsTold(fault)
        self._told = self._loop.create_future()
        self._loop.add_reader(self._connection, self._tell)
        return True

    @property
    def sandbox_ended(self) -> asyncio.Future[None]:
        """Done when the agent has ended."""
        return self._told

    async def call(self, work: Callable[[int], T], *, within: float) -> T:
        """Call ``work`` with the descriptor in a thread, one at a time. Raises TimeoutError: it is then still at work."""
        working = self._loop.run_in_executor(self._threads, work, self._fds[0])
        self._working = working
        done, _ = await asyncio.wait({working}, timeout=within)
        if not done:
            raise TimeoutError
        return working.result()

    def keep(self, descriptor: int) -> None:
        """Take over another descriptor that :meth:`call` works with: it is closed with the file and not before."""
        self._fds.append(descriptor)

    def close(self) -> None:
        """Does not wait. The descriptors are closed behind a thread that still works with them."""
        self._loop.remove_reader(self._connection)
        self._connection.close()
        if self._working is None:
            self._close_all()
        else:
            # If it has ended already: a turn of the loop later.
            self._working.add_done_callback(self._close_behind)

    def _tell(self) -> None:
        self._loop.remove_reader(self._connection)
        if not self._told.done():
            self._told.set_result(None)

    def _receive(self) -> bytes:
        answer, ancillary, flags, _ = self._connection.recvmsg(
            _LARGEST_ANSWER, _ROOM_FOR_FDS, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        )
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._fds.extend(numbers)
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise _NotAsTold("an answer too long, or more descriptors than there is room for")
        return answer

    def _close_behind(self, working: asyncio.Future[Any]) -> None:
        if not working.cancelled():
            # Nobody waits for it any more.
            working.exception()
        self._close_all()

    def _close_all(self) -> None:
        if not self._fds:
            self._released()
            return
        try:
            closing = self._loop.run_in_executor(self._threads, _close, self._fds)
        except RuntimeError:
            # The edge is ending and takes no more work.
            _close(self._fds)
            self._released()
            return
        closing.add_done_callback(lambda _: self._released())


class _NotAsTold(Exception):
    """The agent has sent something else than its answer says."""


def _address(located: Located) -> str | None:
    path = located.agent_target.removeprefix(_UNIX)
    if located.relayed or path == located.agent_target or not path.startswith("/"):
        return None
    return path + _SUFFIX


def _connect(address: str, *, token: str, user: str | None, path: str) -> socket.socket | None:
    """A connection on which the question was asked; never waits."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        connection.connect(address)
        connection.send(b"\0".join(word.encode() for word in (token, user or "", path)))
    except OSError:
        # No such socket, or nobody behind it, or too many before us.
        connection.close()
        return None
    return connection


def _fault(fd: int, size: int) -> str | None:
    """What speaks against sending this descriptor's content as a file of ``size`` bytes. Raises OSError."""
    mode = fcntl.fcntl(fd, fcntl.F_GETFL)
    # One that only names a file counts as readable by these bits.
    if mode & os.O_ACCMODE != os.O_RDONLY or mode & os.O_PATH:
        return "a descriptor that is not for reading"
    if (kind := _file_system_type(fd)) not in _OF_THE_KERNEL:
        return f"a descriptor on a file system of type {kind:#x}"
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        return "a descriptor of something else than a file"
    return None if about.st_size == size else "a file of another size"


def _file_system_type(fd: int) -> int:
    # Far more than the largest layout; the type stands first in all of them, as one machine word or less.
    answer = (ctypes.c_long * 64)()
    if _libc.fstatfs(ctypes.c_int(fd), ctypes.byref(answer)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer[0] & 0xFFFFFFFF


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
