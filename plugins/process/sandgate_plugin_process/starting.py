"""Starting the first process of a box, and hearing from its agent that it is ready.

The core runs gRPC, in whose presence a fork is not safe: a program is started by ``Popen`` without ``preexec_fn``,
``user`` or ``group``, so that it uses vfork. Descriptors are closed in the child, whoever opened them.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import json
import logging
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from sandgate_errors import Internal, NoSpace, ResourceExhausted, SandgateError
from sandgate_plugin_process.freezing import Group
from sandgate_plugin_process.pids import ProcessId

__all__ = [
    "START_LIMIT_SECONDS",
    "Descriptor",
    "Joining",
    "Program",
    "StartFailed",
    "Started",
    "agent_ready",
    "give_up",
    "start",
    "tail",
    "told",
]

_log = logging.getLogger(__name__)

# A first start on a cold disk reads the interpreter and gRPC; a start that takes longer than this will not succeed.
START_LIMIT_SECONDS = 30.0
_READY_LINE_LIMIT_BYTES = 64 * 1024
_LOG_TAIL_BYTES = 2048
_NO_ROOM = {errno.EAGAIN: "processes", errno.EMFILE: "open files", errno.ENFILE: "open files", errno.ENOMEM: "memory"}


class StartFailed(Exception):
    """The program did not come up; the text is for the log, never for a client."""


class Descriptor(enum.Enum):
    """Stands in a program's arguments for the number of a descriptor that it inherits."""

    #: Holds the options that must not show in the list of processes.
    OPTIONS = enum.auto()
    #: Takes the report on the first process of the program's pid namespace.
    INFO = enum.auto()
    #: Stands for several, with commas between: groups that the program joins by itself.
    JOINED = enum.auto()
    #: Likewise: groups that what it starts is to join later.
    GROUPS = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Program:
    """What to start."""

    executable: str
    #: With the name it gives itself first.
    argv: Sequence[str | Descriptor]
    env: Mapping[str, str] = field(default_factory=dict)
    #: NUL-separated; for programs that take ``Descriptor.OPTIONS``.
    options: bytes = b""


@dataclass(frozen=True)
class Joining:
    """The control groups of a box that is started."""

    #: Of the first process, which does not start without them.
    needed: tuple[Path, ...] = ()
    #: One for pauses alone, which otherwise go another way. Not for programs that join by themselves.
    optional: Group | None = None
    commands: tuple[Path, ...] = ()
    terminals: tuple[Path, ...] = ()

    def opened(self, stack: contextlib.ExitStack) -> Mapping[Descriptor, Sequence[int]]:
        """Descriptors through which a process puts itself into the groups, whatever rights it has by then.

        The kernel looks at the rights of whoever opened the file (cgroups(7)).
        """
        return {
            Descriptor.JOINED: [_opened(group, stack) for group in self.needed],
            Descriptor.GROUPS: [_opened(group, stack) for group in (*self.commands, *self.terminals)],
        }

    def told(self, descriptors: Sequence[int]) -> Mapping[str, object]:
        """What the agent's settings say of ``Descriptor.GROUPS``."""
        split = len(self.commands)
        return {"commands": list(descriptors[:split]), "terminals": list(descriptors[split:])}


def _opened(group: Path, stack: contextlib.ExitStack) -> int:
    descriptor = os.open(group / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


@dataclass(frozen=True)
class Started:
    """A program that runs."""

    popen: subprocess.Popen[bytes]
    main: ProcessId
    init: ProcessId | None
    #: Whether it and all that it will ever start are in the group asked for.
    grouped: bool = False

    @property
    def output(self) -> IO[bytes]:
        assert self.popen.stdout is not None  # noqa: S101 - always a pipe
        return self.popen.stdout


def start(program: Program, *, first_line: Mapping[str, object], log: Path, joining: Joining) -> Started:
    """Start a program and give it its settings; blocks until it has reported its init, if it does.

    A program that takes ``Descriptor.OPTIONS`` starts nothing before it has them, so it is moved into its groups first.
    Raises StartFailed, OSError; the caller then looks for what may run all the same.
    """
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("ab"))
        lists = {name: numbers for name, numbers in joining.opened(stack).items() if numbers and name in program.argv}
        inherited: dict[Descriptor, int] = {}
        info = options = None
        if Descriptor.OPTIONS in program.argv:
            inherited[Descriptor.OPTIONS], options = os.pipe()
        if Descriptor.INFO in program.argv:
            info, inherited[Descriptor.INFO] = os.pipe()
            stack.callback(os.close, info)
        try:
            popen = _popen(program, {**{name: [number] for name, number in inherited.items()}, **lists}, output)
        except BaseException:
            if options is not None:
                os.close(options)
            raise
        finally:
            for descriptor in inherited.values():
                # Held open here, the report would never end, nor would a program that has gone be noticed.
                os.close(descriptor)
        try:
            grouped = options is not None and _give_options(popen, options, program.options, joining)
            groups = {"groups": joining.told(lists[Descriptor.GROUPS])} if Descriptor.GROUPS in lists else {}
            return replace(_introduce(popen, {**first_line, **groups}, info), grouped=grouped)
        except BaseException as error:
            give_up(popen)
            if isinstance(error, StartFailed):
                raise StartFailed(f"{error}; its log ends: {tail(log)}") from error
            raise


def _popen(
    program: Program, inherited: Mapping[Descriptor, Sequence[int]], errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            ",".join(map(str, inherited.get(word, ()))) if isinstance(word, Descriptor) else word
            for word in program.argv
        ],
        executable=program.executable,
        env=dict(program.env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        pass_fds=tuple(number for numbers in inherited.values() for number in numbers),
        start_new_session=True,
        cwd="/",
    )


def _introduce(popen: subprocess.Popen[bytes], first_line: Mapping[str, object], info: int | None) -> Started:
    main = ProcessId.of(popen.pid)
    if main is None:
        raise StartFailed("it ended at once")
    init = None if info is None else _read_init(info)
    assert popen.stdin is not None  # noqa: S101 - always a pipe
    try:
        # Far below the size of a pipe: does not block.
        popen.stdin.write(json.dumps(first_line).encode() + b"\n")
        popen.stdin.close()
    except BrokenPipeError:
        raise StartFailed("it ended before it was told what to do") from None
    return Started(popen, main, init)


def give_up(popen: subprocess.Popen[bytes]) -> None:
    """End a program that nobody has taken charge of. What it has started itself is left to its box's end."""
    popen.kill()
    popen.wait()
    for pipe in (popen.stdin, popen.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _give_options(popen: subprocess.Popen[bytes], descriptor: int, options: bytes, joining: Joining) -> bool:
    """Whether the program was in the group for pauses before it could start anything."""
    try:
        main = ProcessId.of(popen.pid)
        for needed in joining.needed:
            if main is not None:
                Group(needed).add(main)
        grouped = joining.optional is not None and _joined(main, joining.optional)
        rest = memoryview(options)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except BrokenPipeError:
        raise StartFailed("it ended before it was told what to do") from None
    finally:
        os.close(descriptor)
    return grouped


def _joined(main: ProcessId | None, group: Group) -> bool:
    try:
        if main is not None:
            group.add(main)
    except OSError as error:
        _log.info("a sandbox cannot be moved into its control group %s: %s", group.path, error)
        return False
    return main is not None


def _read_init(info: int) -> ProcessId:
    """The process that bubblewrap names as ``child-pid`` in one JSON object."""
    deadline = time.monotonic() + START_LIMIT_SECONDS
    # Not select(2): the core may well hold more than 1024 descriptors.
    poll = select.poll()
    poll.register(info, select.POLLIN)
    text = b""
    while not text.rstrip().endswith(b"}"):
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        piece = os.read(info, 4096) if ready else b""
        if not piece:
            raise StartFailed("it did not report its first process")
        text += piece
    init = ProcessId.of(int(json.loads(text)["child-pid"]))
    if init is None:
        raise StartFailed("its first process ended at once")
    return init


async def agent_ready(output: IO[bytes], log: Path) -> None:
    """Wait until the agent says that it accepts calls; ``output`` is of no use afterwards.

    Raises Internal when it does not; the reason is in the gateway's log, as it may speak of the host.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_READY_LINE_LIMIT_BYTES, loop=loop)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader, loop=loop), output)
    try:
        async with asyncio.timeout(START_LIMIT_SECONDS):
            line = await reader.readline()
        answer = json.loads(line) if line else {"error": "it ended"}
        ready = isinstance(answer, dict) and answer.get("ready") is True
    except (TimeoutError, ValueError) as error:
        answer, ready = {"error": f"no ready line: {error!r}"}, False
    finally:
        transport.close()
    if not ready:
        reason = answer.get("error") if isinstance(answer, dict) else answer
        _log.error("a sandbox's agent did not start: %s; its log ends: %s", reason, tail(log))
        raise Internal("the sandbox could not be started")


def tail(log: Path) -> str:
    """The last words of a log, on one line."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return " | ".join(file.read().decode(errors="replace").split("\n")).strip(" |")
    except OSError:
        return ""


def told(error: OSError | StartFailed) -> SandgateError:
    """What a client hears of a failed start or copy; the log hears more."""
    _log.error("a sandbox could not be started: %s", error)
    code = error.errno if isinstance(error, OSError) else None
    if code in {errno.ENOSPC, errno.EDQUOT}:
        return NoSpace("no disk space is left for another sandbox")
    if code in _NO_ROOM:
        return ResourceExhausted(f"the machine has no {_NO_ROOM[code]} left for another sandbox")
    return Internal("the sandbox could not be started")
