"""Calls of the agent's process service, through the core's relay: from arguments to requests and back, without I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from sandgate.client.limits import request_limit, seconds_of
from sandgate.client.records import ProcessInfo, ProcessKind, PtySize
from sandgate.client.steps import Ask, Metadata, Method, Open, Steps
from sandgate_api.envd.v1 import process_pb2 as pb
from sandgate_errors import InvalidArgument, NotFound, SandboxNotFound

__all__ = ["Program", "Target", "shell", "terminal_program"]

#: Seconds from SIGTERM to SIGKILL at the time limit (X1).
_TERM_GRACE = 5
#: Bytes in one message; a longer input goes in several, which other callers' input may come between.
_INPUT_PIECE = 4 * 1024 * 1024
_MOST_TIMEOUT_DIGITS = 10

_SERVICE = "/sandgate_api.envd.v1.Process/"
_LIST = Method(_SERVICE + "List", pb.ListResponse)
_START = Method(_SERVICE + "Start", pb.StartResponse)
_CONNECT = Method(_SERVICE + "Connect", pb.ConnectResponse)
_UPDATE = Method(_SERVICE + "Update", pb.UpdateResponse)
_SEND_INPUT = Method(_SERVICE + "SendInput", pb.SendInputResponse)
_SEND_SIGNAL = Method(_SERVICE + "SendSignal", pb.SendSignalResponse)
_CLOSE_STDIN = Method(_SERVICE + "CloseStdin", pb.CloseStdinResponse)

_KINDS = {pb.PROCESS_KIND_COMMAND: ProcessKind.COMMAND, pb.PROCESS_KIND_TERMINAL: ProcessKind.TERMINAL}


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to start, its words as they are: no shell reads them."""

    argv: Sequence[str]
    envs: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    #: None: the sandbox's default user.
    user: str | None = None
    stdin: bool = False
    tag: str | None = None
    #: Seconds; None or 0: none.
    timeout: float | None = None
    kill_tree: bool = False
    #: Present: on a terminal.
    size: PtySize | None = None

    def request(self) -> pb.StartRequest:
        """Raises InvalidArgument."""
        if not self.argv:
            raise InvalidArgument("there is no program to start")
        try:
            return pb.StartRequest(
                process=pb.ProcessConfig(cmd=self.argv[0], args=self.argv[1:], envs=self.envs, cwd=self.cwd),
                pty=None if self.size is None else _pty(self.size),
                tag=self.tag,
                stdin=self.stdin,
                kill_tree=self.kill_tree,
                term_grace=Duration(seconds=_TERM_GRACE),
            )
        except (TypeError, ValueError) as error:
            # Not text, or text that UTF-8 cannot carry: names of files may hold such.
            raise InvalidArgument(f"the command cannot be sent: {error}") from None

    def metadata(self) -> Metadata:
        limit = seconds_of(self.timeout)
        pairs: list[tuple[str, str | bytes]] = []
        if self.user is not None:
            pairs.append(("acting-user-bin", self.user.encode("utf-8", "surrogateescape")))
        if limit is not None:
            text = str(max(1, math.ceil(limit * 1000)))
            if len(text) > _MOST_TIMEOUT_DIGITS:
                raise InvalidArgument(f"timeout is too long: {self.timeout} s")
            pairs.append(("timeout-ms", text))
        return tuple(pairs)


def shell(command: str) -> tuple[str, ...]:
    """A command line, read by a login shell as the E2B SDKs have it (P1)."""
    return ("/bin/bash", "-l", "-c", command)


def terminal_program(
    size: PtySize, *, user: str | None, cwd: str | None, envs: Mapping[str, str], timeout: float | None
) -> Program:
    """The shell of a terminal, with what the E2B SDKs set there themselves (P20)."""
    settings = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    return Program(
        argv=("/bin/bash", "-i", "-l"), envs={**settings, **envs}, user=user, cwd=cwd, timeout=timeout, size=size
    )


@dataclass(frozen=True, kw_only=True)
class Target:
    """The process service of one sandbox's agent."""

    sandbox_id: str

    @property
    def metadata(self) -> Metadata:
        if not (self.sandbox_id.isascii() and self.sandbox_id.isprintable()):
            raise InvalidArgument("a sandbox id has letters and digits only")
        return (("sandbox-id", self.sandbox_id),)

    def start(self, program: Program) -> Open:
        return Open(method=_START, request=program.request(), metadata=(*self.metadata, *program.metadata()))

    def connect(self, pid: int, from_seq: int | None) -> Open:
        if from_seq is not None and not 0 <= from_seq < 1 << 64:
            raise InvalidArgument(f"from_seq is no sequence number: {from_seq}")
        request = pb.ConnectRequest(process=_selector(pid), from_seq=from_seq)
        return Open(method=_CONNECT, request=request, metadata=self.metadata)

    def list(self, timeout: float | None) -> Steps[list[ProcessInfo]]:
        reply = yield self._ask(_LIST, pb.ListRequest(), timeout)
        return [_info(process) for process in reply.processes]

    def kill(self, pid: int, timeout: float | None) -> Steps[bool]:
        """Whether there was such a process (X9)."""
        return self._signal(pid, pb.SIGNAL_SIGKILL, timeout)

    def terminate(self, pid: int, timeout: float | None) -> Steps[bool]:
        return self._signal(pid, pb.SIGNAL_SIGTERM, timeout)

    def _signal(self, pid: int, signal: pb.Signal.ValueType, timeout: float | None) -> Steps[bool]:
        request = pb.SendSignalRequest(process=_selector(pid), signal=signal)
        try:
            yield self._ask(_SEND_SIGNAL, request, timeout)
        except SandboxNotFound:
            raise
        except NotFound:
            return False
        return True

    def send_input(self, pid: int, data: str | bytes, timeout: float | None, *, terminal: bool) -> Steps[None]:
        raw = data.encode() if isinstance(data, str) else bytes(data)
        for start in range(0, len(raw) or 1, _INPUT_PIECE):
            piece = raw[start : start + _INPUT_PIECE]
            given = pb.ProcessInput(pty=piece) if terminal else pb.ProcessInput(stdin=piece)
            request = pb.SendInputRequest(process=_selector(pid), input=given)
            yield self._ask(_SEND_INPUT, request, timeout)

    def close_stdin(self, pid: int, timeout: float | None) -> Steps[None]:
        yield self._ask(_CLOSE_STDIN, pb.CloseStdinRequest(process=_selector(pid)), timeout)

    def resize(self, pid: int, size: PtySize, timeout: float | None) -> Steps[None]:
        yield self._ask(_UPDATE, pb.UpdateRequest(process=_selector(pid), pty=_pty(size)), timeout)

    def _ask(self, method: Method[Any], request: Message, timeout: float | None) -> Ask:
        return Ask(method=method, request=request, metadata=self.metadata, timeout=request_limit(timeout))


def _selector(pid: int) -> pb.ProcessSelector:
    if not 0 <= pid < 1 << 32:
        raise InvalidArgument(f"there is no process id {pid}")
    return pb.ProcessSelector(pid=pid)


def _pty(size: PtySize) -> pb.PTY:
    if not (0 < size.rows < 1 << 16 and 0 < size.cols < 1 << 16):
        raise InvalidArgument(f"a terminal has 1 to 65535 rows and columns, not {size.rows} and {size.cols}")
    return pb.PTY(size=pb.PTY.Size(rows=size.rows, cols=size.cols))


def _info(process: pb.ProcessInfo) -> ProcessInfo:
    config = process.config
    return ProcessInfo(
        pid=process.pid,
        cmd=config.cmd,
        args=tuple(config.args),
        envs=dict(config.envs),
        cwd=config.cwd if config.HasField("cwd") else None,
        tag=process.tag if process.HasField("tag") else None,
        kind=_KINDS.get(process.kind, ProcessKind.UNKNOWN),
    )
