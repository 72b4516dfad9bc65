r"""The processes that start programs: small, single threaded, forked before grpc is loaded.

A process in which gRPC runs must never fork, and a process that still has to change its user cannot use vfork. So the
agent forks one *root spawner* first of all, and that one forks an *account spawner* for each account, which becomes
that account once and then starts its programs with posix_spawn (vfork inside)::

    agent --- root spawner --- account spawner (root)  --- programs
          control socket   \-- account spawner (user)  --- programs
                                    ^-- each has a socket of its own to the agent

Programs are children of their account spawner, which reaps them and tells the agent how they ended. The root spawner is
the subreaper of all: when a sandbox's user kills an account spawner, its programs become the root spawner's children and
it reports their ends instead. It also ends everything below it when the agent is gone.

Messages (see :mod:`sandgate_agent.frames`); a request carries an ``id`` that its reply repeats:

=========  ======================================================================================================
to root    ``{"op": "account", "id", "uid", "gid", "groups"}`` with one socket; ``{"op": "drop", "id"}`` kills it
to account ``{"op": "start", "id", "argv", "env", "cwd", "terminal", "mark", "subreaper"}`` with stdin, stdout, stderr,
           or one terminal
replies    ``{"id", "pid"}`` with a pidfd where the kernel has them; ``{"id", "failed": where, "errno"}``
notices    ``{"exit": pid, "status": wait status}``; ``{"refused": text}`` when an account cannot be become
=========  ======================================================================================================
"""

from __future__ import annotations

import abc
import errno
import fcntl
import functools
import gc
import os
import select
import signal
import socket
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence

from sandgate_agent import allotment, frames, marks
from sandgate_agent.settings import Groups

__all__ = ["fork_root_spawner"]

_SIGNALS = tuple(number for number in signal.valid_signals() if number not in {signal.SIGKILL, signal.SIGSTOP})
#: What a careless `pkill -u user` sends. Losing a spawner is survivable, but needs not happen for this.
_IGNORED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
#: Not the program's fault: the start itself fails, instead of looking like a program that ended with 126.
_START_FAILURES = frozenset({errno.E2BIG, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EINVAL})
_OOM_SCORE_ADJUSTMENT = 100
_STANDARD = (0, 1, 2)
_NO_GROUPS = Groups()
#: How long the root spawner hunts descendants that keep forking, once the agent is gone.
_SWEEP_SECONDS = 1.5


def fork_root_spawner(
    identity: str, *, withheld: int | None = None, groups: Groups = _NO_GROUPS, processes: int | None = None
) -> tuple[int, socket.socket]:
    """Fork the root spawner: its pid and the control socket. Call before any thread, asyncio or grpc exists.

    ``withheld`` is a descriptor of the agent's that neither a spawner nor a program may have. The descriptors of
    ``groups`` are the spawners' alone. ``processes`` is how many an account may have.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        if withheld is not None:
            os.close(withheld)
        _live(lambda: _RootSpawner(theirs, identity, groups=groups, processes=processes).run(), close=(ours,))
    theirs.close()
    for descriptor in (*groups.commands, *groups.terminals):
        os.close(descriptor)
    return pid, ours


def _live(body: Callable[[], None], *, close: Sequence[socket.socket]) -> None:
    """Run a forked spawner to its end. Never returns: nothing of the parent's stack may go on in the child."""
    code = 1
    try:
        gc.disable()
        for sock in close:
            sock.close()
        _detach()
        body()
        code = 0
    except BaseException as error:
        _complain(f"sandgate spawner {os.getpid()}: {type(error).__name__}: {error}\n")
    finally:
        os._exit(code)


def _detach() -> None:
    """Null device as input and output: the agent's own are a pipe whose end its starter waits for."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)


def _complain(text: str) -> None:
    try:
        os.write(2, text.encode(errors="replace"))
    except OSError:
        pass


class _Spawner(abc.ABC):
    """One socket to the agent, and children to reap."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = frames.Decoder()
        self._wake, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)

    def run(self) -> None:
        try:
            self._loop()
        finally:
            self._agent_gone()

    def _loop(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    os.read(self._wake, 4096)
                    self._reap()
                elif not self._serve():
                    return

    def _serve(self) -> bool:
        if not frames.read(self._sock, self._decoder):
            return False
        for message, fds in self._decoder.messages():
            received = [fd for fd in fds if fd is not None]
            try:
                if len(received) != len(fds):
                    raise frames.BadFrame("a descriptor is missing")
                answer = self._handle(message, received)
            finally:
                for fd in received:
                    os.close(fd)
            # Not before the descriptors are closed: a caller who hears of the start may rely on the program alone having
            # them, for example on a pipe without readers to be broken.
            answer()
        return True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._ended(pid, status)

    def _tell(self, message: frames.Message, fds: Sequence[int] = ()) -> None:
        try:
            frames.write(self._sock, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            # The agent is gone; the end of the socket is the next thing the loop sees.
            pass

    def _ended(self, pid: int, status: int) -> None:
        self._tell({"exit": pid, "status": status})

    @abc.abstractmethod
    def _handle(self, message: frames.Message, fds: list[int]) -> Callable[[], None]:
        """Do what is asked; the result says so to the agent."""

    def _agent_gone(self) -> None:
        """The agent closed the socket or died, or this process failed."""


class _RootSpawner(_Spawner):
    """Forks account spawners, and inherits the children of those that die."""

    def __init__(self, sock: socket.socket, identity: str, *, groups: Groups, processes: int | None) -> None:
        from sandgate_agent import kernel

        super().__init__(sock)
        # To move takes the kernel some milliseconds: meanwhile the agent loads grpc.
        allotment.join(groups.commands, complain=_complain)
        for descriptor in groups.commands:
            os.close(descriptor)
        self._terminals = groups.terminals
        self._identity = identity
        self._accounts: dict[int, int] = {}
        os.setsid()
        os.chdir("/")
        kernel.become_subreaper()
        kernel.set_name("sandgate-root")
        _close_hypervisor()
        allotment.set_priorities()
        if processes is not None:
            allotment.limit_processes(processes)

    def _handle(self, message: frames.Message, fds: list[int]) -> Callable[[], None]:
        if message["op"] == "drop":
            self._drop(message["id"])
        else:
            self._add(message, fds[0])
        return _nothing

    def _add(self, message: frames.Message, fd: int) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            with socket.socket(fileno=os.dup(fd)) as sock:
                frames.write(sock, {"refused": f"cannot fork: {error.strerror}", "errno": error.errno})
            return
        if pid == 0:
            sock = socket.socket(fileno=os.dup(fd))
            os.close(fd)
            _live(
                lambda: _account_spawner(sock, self._identity, message, terminals=self._terminals), close=(self._sock,)
            )
        self._accounts[message["id"]] = pid

    def _drop(self, account: int) -> None:
        """End an account spawner that does not answer (stopped, or stuck in a file system); its programs live on."""
        if (pid := self._accounts.get(account)) is not None:
            os.kill(pid, signal.SIGKILL)

    def _ended(self, pid: int, status: int) -> None:
        for account, spawner in self._accounts.items():
            if spawner == pid:
                del self._accounts[account]
                return
        super()._ended(pid, status)

    def _agent_gone(self) -> None:
        """End all descendants. Killing children makes theirs ours, so this reaches what left its group or session."""
        deadline = time.monotonic() + _SWEEP_SECONDS
        while (children := _children()) and time.monotonic() < deadline:
            for pid in children:
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            time.sleep(0.002)
            self._reap()


def _nothing() -> None:
    """No answer is waited for."""


def _children() -> list[int]:
    """Unreaped children of this single-threaded process."""
    with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
        return [int(pid) for pid in file.read().split()]


def _close_hypervisor() -> None:
    """Where programs may gain privileges by files of the image, the kernel lets only its own root filter their calls."""
    from sandgate_agent.hypervisor import close_hypervisor

    try:
        close_hypervisor()
    except OSError as error:
        if error.errno != errno.EACCES:
            _complain(f"sandgate spawner: programs are not kept from the hypervisor: {error}\n")


def _account_spawner(
    sock: socket.socket, identity: str, account: Mapping[str, object], *, terminals: Sequence[int]
) -> None:
    spawner = _AccountSpawner(sock, terminals)
    try:
        _become(identity, account)
    except OSError as error:
        spawner.refuse(f"cannot become uid {account['uid']}: {error.strerror}", error)
        return
    spawner.run()


def _become(identity: str, account: Mapping[str, object]) -> None:
    from sandgate_agent import kernel

    # Before the user changes: afterwards these files belong to root.
    _write("/proc/self/oom_score_adj", str(_OOM_SCORE_ADJUSTMENT), may_fail=True)
    kernel.set_name("sandgate-spawn")
    uid, gid = int(str(account["uid"])), int(str(account["gid"]))
    groups = account["groups"]
    if identity == "switch" and uid != 0 and isinstance(groups, list):
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    elif identity == "nested" and uid != 0:
        _enter_namespace(uid, gid)
    # Programs of the same user must not be able to steer this process. A change of user has the same effect.
    kernel.hide_memory()


def _enter_namespace(uid: int, gid: int) -> None:
    from sandgate_agent import kernel

    kernel.new_user_namespace()
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} 0 1\n")
    _write("/proc/self/gid_map", f"{gid} 0 1\n")
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    # A new namespace gives all capabilities over its one id, so permissions would not hold in chdir and look-up.
    kernel.drop_capabilities()


def _write(path: str, text: str, *, may_fail: bool = False) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError:
        if not may_fail:
            raise


class _AccountSpawner(_Spawner):
    """Starts programs as the account it has become."""

    def __init__(self, sock: socket.socket, terminals: Sequence[int]) -> None:
        super().__init__(sock)
        self._terminals = terminals

    def refuse(self, text: str, error: OSError) -> None:
        self._tell({"refused": text, "errno": error.errno})

    def _handle(self, message: frames.Message, fds: list[int]) -> Callable[[], None]:
        request = message["id"]
        try:
            os.chdir(message["cwd"])
        except OSError as error:
            return functools.partial(self._tell, {"id": request, "failed": "cwd", "errno": error.errno})
        try:
            return functools.partial(self._announce, request, self._start(message, fds))
        except OSError as error:
            return functools.partial(self._tell, {"id": request, "failed": "start", "errno": error.errno})
        finally:
            # Not to hold the directory once the program has it.
            os.chdir("/")

    def _announce(self, request: int, pid: int) -> None:
        # Opened here, where the process cannot have been reaped yet: its number may be another's a moment later.
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            self._tell({"id": request, "pid": pid})
            return
        try:
            self._tell({"id": request, "pid": pid}, [pidfd])
        finally:
            os.close(pidfd)

    def _start(self, message: frames.Message, fds: list[int]) -> int:
        argv, env = message["argv"], message["env"]
        try:
            program = _find(argv[0], env.get("PATH", ""))
            with marks.marking(message["mark"]):
                if message["terminal"] or message["subreaper"]:
                    return _fork_and_exec(
                        program, argv, env, functools.partial(_prepare, message, fds, self._terminals)
                    )
                return os.posix_spawn(
                    program,
                    argv,
                    env,
                    file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)],
                    setpgroup=0,
                    setsigmask=(),
                    setsigdef=_SIGNALS,
                )
        except OSError as error:
            if error.errno in _START_FAILURES:
                raise
            return _start_failure(argv[0], error, fds=fds, terminal=message["terminal"])


def _find(command: str, path: str) -> str:
    """Look a name up as execvp does, in the working directory and with the rights of the account."""
    if "/" in command:
        return command
    refused: OSError | None = None
    for folder in path.split(":"):
        candidate = os.path.join(folder or ".", command)
        if os.path.isfile(candidate):
            if os.access(candidate, os.X_OK):
                return candidate
            refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    raise refused or FileNotFoundError(errno.ENOENT, "command not found")


def _fork_and_exec(program: str, argv: list[str], env: dict[str, str], prepare: Callable[[], None]) -> int:
    """The slow way, for what posix_spawn has no steps for: ``prepare`` runs in the child, right before its program."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
        if pid == 0:
            _exec(program, argv, env=env, prepare=prepare, failure=writer)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    with open(reader, "rb") as file:
        number = file.read()
    if number:
        os.waitpid(pid, 0)
        raise OSError(int(number), os.strerror(int(number)))
    return pid


def _exec(program: str, argv: list[str], *, env: dict[str, str], prepare: Callable[[], None], failure: int) -> None:
    try:
        prepare()
        _default_signals()
        os.execve(program, argv, env)
    except OSError as error:
        os.write(failure, str(error.errno).encode())
    finally:
        os._exit(127)


def _prepare(message: frames.Message, fds: Sequence[int], terminals: Sequence[int]) -> None:
    from sandgate_agent import kernel

    if message["terminal"]:
        allotment.join(terminals, complain=_complain)
        os.setsid()
        fcntl.ioctl(fds[0], termios.TIOCSCTTY, 0)
    else:
        os.setpgid(0, 0)
    if message["subreaper"]:
        kernel.become_subreaper()
    # One terminal stands for all three.
    for number in _STANDARD:
        os.dup2(fds[number] if len(fds) > 1 else fds[0], number)


def _default_signals() -> None:
    for number in _SIGNALS:
        try:
            signal.signal(number, signal.SIG_DFL)
        except OSError:
            # The two that the C library keeps for itself.
            pass


def _start_failure(command: str, error: OSError, *, fds: Sequence[int], terminal: bool) -> int:
    """A program that cannot be executed looks like what a shell makes of it: a process that says why and ends (P4)."""
    missing = error.errno in {errno.ENOENT, errno.ENOTDIR}
    reason = "Is a directory" if "/" in command and os.path.isdir(command) else error.strerror
    pid = os.fork()
    if pid == 0:
        try:
            if terminal:
                os.setsid()
            else:
                os.setpgid(0, 0)
            os.write(fds[-1], f"{command}: {reason}\n".encode())
        except OSError:
            pass
        finally:
            os._exit(127 if missing else 126)
    return pid


if sys.platform != "linux":  # pragma: no cover
    raise ImportError("the agent runs on Linux")
