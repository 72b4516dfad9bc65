"""The agent's side of its spawners: ask one to start a program, hear how the program ended.

Between :mod:`sandgate_agent.processes` and :mod:`sandgate_agent.spawner`, whose messages it speaks. Everything here runs
in callbacks of the event loop and never blocks: requests are queued whole, so that a caller who is cancelled cannot
leave half a message behind.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sandgate_agent import frames
from sandgate_agent.accounts import Account
from sandgate_agent.command import Command, Reach
from sandgate_agent.descriptors import Descriptors
from sandgate_agent.family import Families
from sandgate_errors import Internal, InvalidArgument, ResourceExhausted, SandgateError, Unavailable

__all__ = ["Child", "Launcher", "Program"]

log = logging.getLogger(__name__)

#: A spawner answers in a millisecond. One that does not is stopped by the sandbox's user, or stuck in a file system.
_ANSWER_SECONDS = 10
#: How long an end whose report was lost together with its spawner is waited for.
_LOST_STATUS_SECONDS = 1
#: Covers the root spawner's own limit for ending its descendants.
_CLOSE_SECONDS = 1.8
#: Spawners kept for accounts that run nothing. A sandbox rarely has more than `root` and `user`.
_IDLE_SPAWNERS = 8
_PIDFD_SIGNAL_PROCESS_GROUP = 4


@dataclass(frozen=True, kw_only=True)
class Program:
    """What to start. ``fds`` are stdin, stdout and stderr, or one terminal for all three; the launcher closes them."""

    argv: Sequence[str]
    env: dict[str, str]
    cwd: str
    fds: Sequence[int]
    #: Whether the first of ``fds`` becomes the controlling terminal.
    terminal: bool = False
    #: By which what it starts is recognized, see :mod:`sandgate_agent.marks`; 0: by nothing.
    mark: int
    #: Whether its orphans become its children (X4).
    subreaper: bool = False


class Child:
    """A started program, until its end is known."""

    def __init__(self, pid: int, pidfd: int | None) -> None:
        self.pid = pid
        #: The wait status; None when it was lost.
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.orphan_status: int | None = None
        #: Called with what whoever follows its output has to hear, where it does not come to them whole.
        self.on_trouble: Callable[[SandgateError], None] = lambda _: None
        self._pidfd = pidfd

    @property
    def pidfd(self) -> int | None:
        return self._pidfd

    def finish(self, status: int | None) -> None:
        if not self.ended.done():
            self.ended.set_result(status)

    def signal_group(self, number: int) -> None:
        """Send a signal to the program's process group; nothing happens when it is gone.

        A program that moved itself to another group gets it too.

        By pidfd where the kernel can (6.9), because that names the group even after its leader was reaped and never
        another group that took over the number. Else only while the leader certainly has its number.
        """
        try:
            left_group = not self.ended.done() and os.getpgid(self.pid) != self.pid
            self._signal_group(number)
            if left_group and self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            pass

    def _signal_group(self, number: int) -> None:
        if self._pidfd is not None:
            try:
                signal.pidfd_send_signal(self._pidfd, number, None, _PIDFD_SIGNAL_PROCESS_GROUP)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            signal.pidfd_send_signal(self._pidfd, 0)
        if not self.ended.done():
            os.killpg(self.pid, number)

    def close(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


class _Channel:
    """A socket to a spawner: whole messages out, in order, with their descriptors; messages in."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_message: Callable[[frames.Message, list[int | None]], None],
        on_lost: Callable[[], None],
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._decoder = frames.Decoder()
        self._backlog: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)
        self.open = True

    def send(self, message: frames.Message, fds: Sequence[int] = ()) -> None:
        """Queue a message. The descriptors are ours now, and closed once the kernel has passed them on."""
        if not self.open:
            _close_all(fds)
            return
        self._backlog.append((memoryview(frames.encode(message, len(fds))), fds))
        if len(self._backlog) == 1:
            self._flush()

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._decoder.close()
        for _, fds in self._backlog:
            _close_all(fds)
        self._backlog.clear()

    def _flush(self) -> None:
        while self._backlog:
            data, fds = self._backlog[0]
            try:
                sent = socket.send_fds(self._sock, [data], list(fds)) if fds else self._sock.send(data)
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError:
                # The reader sees the end too, and only there what was answered before it is not lost.
                self._loop.remove_writer(self._sock)
                return
            _close_all(fds)
            if sent < len(data):
                self._backlog[0] = (data[sent:], ())
            else:
                self._backlog.popleft()
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            alive = frames.read(self._sock, self._decoder)
            for message, fds in self._decoder.messages():
                self._on_message(message, fds)
        except BlockingIOError:
            return
        except (OSError, frames.BadFrame, KeyError, TypeError, ValueError) as error:
            log.warning("the connection to a spawner broke: %s: %s", type(error).__name__, error)
            alive = False
        if not alive:
            self.close()
            self._on_lost()


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


class _AccountSpawner:
    """One account's spawner: its open requests and its living children."""

    def __init__(self, number: int, sock: socket.socket, on_lost: Callable[[_AccountSpawner], None]) -> None:
        self.number = number
        self.children: dict[int, Child] = {}
        self._requests: dict[int, asyncio.Future[Child]] = {}
        self._numbers = itertools.count(1)
        self._on_lost = on_lost
        self._channel = _Channel(sock, on_message=self._received, on_lost=self._lost)
        self._refusal: SandgateError | None = None

    @property
    def alive(self) -> bool:
        return self._channel.open

    @property
    def idle(self) -> bool:
        return not self.children and not self._requests

    async def start(self, program: Program) -> Child:
        number = next(self._numbers)
        answer: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._requests[number] = answer
        self._channel.send(
            {
                "op": "start",
                "id": number,
                "argv": list(program.argv),
                "env": program.env,
                "cwd": program.cwd,
                "terminal": program.terminal,
                "mark": program.mark,
                "subreaper": program.subreaper,
            },
            program.fds,
        )
        if not self.alive:
            self._lost()
        return await answer

    def close(self) -> None:
        self._channel.close()

    def _received(self, message: frames.Message, fds: list[int | None]) -> None:
        if "exit" in message:
            child = self.children.pop(message["exit"], None)
            if child is not None:
                child.finish(int(message["status"]))
        elif "refused" in message:
            self._refusal = _refusal(str(message["refused"]), message["errno"])
        else:
            self._answered(message, fds)

    def _answered(self, message: frames.Message, fds: list[int | None]) -> None:
        pidfd = fds[0] if fds else None
        answer = self._requests.pop(message["id"], None)
        if "failed" in message:
            if answer is not None and not answer.done():
                answer.set_exception(StartFailed(str(message["failed"]), int(message["errno"])))
            return
        child = Child(int(message["pid"]), pidfd)
        self.children[child.pid] = child
        if answer is None or answer.done():
            # Nobody waits any more: it runs, unlisted, until the sandbox ends. Only after a spawner kept silent so long
            # that its caller was told the start had failed; it must not run on behind the caller's back.
            child.signal_group(signal.SIGKILL)
            child.ended.add_done_callback(lambda _: child.close())
            return
        answer.set_result(child)

    def _lost(self) -> None:
        requests, self._requests = self._requests, {}
        for answer in requests.values():
            if not answer.done():
                answer.set_exception(
                    self._refusal or Unavailable("the process that starts programs was killed; try again")
                )
        self._on_lost(self)


class StartFailed(Exception):
    """A spawner could not start a program: ``where`` is ``cwd`` or ``start``."""

    def __init__(self, where: str, number: int) -> None:
        super().__init__(where, number)
        self.where = where
        self.number = number


def _refusal(text: str, number: object) -> SandgateError:
    return ResourceExhausted(text) if number in {errno.EAGAIN, errno.ENOMEM} else Internal(text)


class Launcher:
    """Starts programs as any account, through one spawner for each."""

    def __init__(
        self, control: socket.socket, root_pid: int, *, switches_users: bool, on_root_lost: Callable[[], None]
    ) -> None:
        #: Whether programs of other accounts run under other ids.
        self.switches_users = switches_users
        #: The ancestor of everything that is started here.
        self.root_pid = root_pid
        self.families = Families(root_pid)
        self._on_root_lost = on_root_lost
        #: Where the next program of an account is started.
        self._spawners: dict[tuple[object, ...], _AccountSpawner] = {}
        #: All that are not known to be dead, also those that were replaced.
        self._living: set[_AccountSpawner] = set()
        self._orphans: dict[int, Child] = {}
        self._numbers = itertools.count(1)
        self._root = _Channel(control, on_message=self._root_received, on_lost=self._root_lost)
        self._closing = False

    def warm(self, account: Account) -> None:
        """Have the account's spawner ready before it is first needed."""
        self._spawner(account)

    async def start(
        self, command: Command, account: Account, *, env: dict[str, str], cwd: str, mark: int
    ) -> tuple[Child, Descriptors]:
        """Start what a caller asked for, with descriptors to follow it. Raises as :meth:`launch`."""
        # A user without files of its own shares the agent's id, which owns new terminals already.
        owner = account.uid if account.uid != os.geteuid() and self.switches_users else None
        descriptors = Descriptors.open(command.size, stdin=command.stdin, owner=owner)
        program = Program(
            argv=[command.cmd, *command.args],
            env=env,
            cwd=cwd,
            fds=descriptors.theirs,
            terminal=command.size is not None,
            mark=mark,
            subreaper=command.reach is Reach.TREE,
        )
        try:
            return await self.launch(account, program), descriptors
        except BaseException:
            descriptors.close_ours()
            raise

    async def launch(self, account: Account, program: Program) -> Child:
        """Start a program.

        Raises InvalidArgument for a working directory that is missing or closed to the account, and for arguments that
        are too long; ResourceExhausted when the system has no room for a process; Unavailable when the spawner died.
        """
        try:
            spawner = self._spawner(account)
        except OSError as error:
            _close_all(program.fds)
            raise ResourceExhausted(f"no room for another process: {error.strerror}") from None
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return await spawner.start(program)
        except StartFailed as failure:
            raise _start_error(failure, program, account) from None
        except TimeoutError:
            self._drop(spawner)
            raise Unavailable(f"the process that starts programs of user '{account.name}' does not answer") from None

    async def close(self) -> None:
        """End everything that was ever started, and the spawners. Bounded."""
        self._closing = True
        for spawner in self._living:
            spawner.close()
        self._root.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CLOSE_SECONDS
        while not self._root_reaped():
            if loop.time() > deadline:
                # Its death ends nothing of ours that is still to be waited for; init reaps it after us.
                os.kill(self.root_pid, signal.SIGKILL)
                return
            await asyncio.sleep(0.005)

    def _root_reaped(self) -> bool:
        try:
            return os.waitpid(self.root_pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True

    def _spawner(self, account: Account) -> _AccountSpawner:
        # The groups too: an account that was put into another group gets a spawner that has it.
        key = (account.uid, account.gid, account.groups)
        spawner = self._spawners.get(key)
        if spawner is None or not spawner.alive:
            self._retire_idle()
            spawner = self._spawners[key] = self._make(account)
        return spawner

    def _make(self, account: Account) -> _AccountSpawner:
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        spawner = _AccountSpawner(number, ours, self._spawner_lost)
        self._living.add(spawner)
        self._root.send(
            {
                "op": "account",
                "id": number,
                "uid": account.uid,
                "gid": account.gid,
                "groups": list(account.groups),
            },
            [theirs.detach()],
        )
        return spawner

    def _retire_idle(self) -> None:
        idle = [key for key, spawner in self._spawners.items() if spawner.idle]
        for key in idle[: max(0, len(idle) - _IDLE_SPAWNERS + 1)]:
            spawner = self._spawners.pop(key)
            spawner.close()
            self._living.discard(spawner)

    def _drop(self, spawner: _AccountSpawner) -> None:
        log.warning("account spawner %d does not answer and is replaced", spawner.number)
        self._forget(spawner)
        self._root.send({"op": "drop", "id": spawner.number})

    def _spawner_lost(self, spawner: _AccountSpawner) -> None:
        """Its children are the root spawner's now; some may have ended already, and been reported ahead of this."""
        self._forget(spawner)
        self._living.discard(spawner)
        children, spawner.children = spawner.children, {}
        for child in children.values():
            if child.orphan_status is not None:
                child.finish(child.orphan_status)
            else:
                self._adopt(child)

    def _forget(self, spawner: _AccountSpawner) -> None:
        self._spawners = {key: other for key, other in self._spawners.items() if other is not spawner}

    def _adopt(self, child: Child) -> None:
        self._orphans[child.pid] = child
        child.ended.add_done_callback(lambda _: self._orphans.pop(child.pid, None))
        if child.pidfd is not None:
            # The spawner may have died between reaping the child and saying so: then nobody will report it.
            asyncio.get_running_loop().add_reader(child.pidfd, self._orphan_gone, child)

    def _orphan_gone(self, child: Child) -> None:
        loop = asyncio.get_running_loop()
        if child.pidfd is not None:
            loop.remove_reader(child.pidfd)
        loop.call_later(_LOST_STATUS_SECONDS, child.finish, None)

    def _root_received(self, message: frames.Message, _fds: list[int | None]) -> None:
        pid, status = int(message["exit"]), int(message["status"])
        if (orphan := self._orphans.get(pid)) is not None:
            orphan.finish(status)
            return
        for spawner in self._living:
            if (child := spawner.children.get(pid)) is not None:
                # Its spawner is dead, only we have not heard of that yet.
                child.orphan_status = status

    def _root_lost(self) -> None:
        if not self._closing:
            self._on_root_lost()


def _start_error(failure: StartFailed, program: Program, account: Account) -> SandgateError:
    text = os.strerror(failure.number)
    if failure.where == "cwd":
        return InvalidArgument(
            _CWD_ERRORS.get(failure.number, "cwd '{cwd}': {text}").format(cwd=program.cwd, user=account.name, text=text)
        )
    if failure.number == errno.E2BIG:
        return InvalidArgument("the arguments and variables are too long for the system")
    if failure.number in {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}:
        return ResourceExhausted(f"the system has no room for another process: {text}")
    return Internal(f"the program could not be started: {text}")


_CWD_ERRORS = {
    errno.ENOENT: "cwd '{cwd}' does not exist",
    errno.ENOTDIR: "cwd '{cwd}' is not a directory",
    errno.EACCES: "cwd '{cwd}' may not be entered by user '{user}'",
}
