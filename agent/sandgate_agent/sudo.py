"""The program ``sudo`` of a sandbox: has a command run as another account, without a password (behaviour.md U9).

A sandbox's processes cannot gain rights (no_new_privs), so the usual ``sudo`` does nothing there. This one asks the agent
(:mod:`sandgate_agent.elevation`) over a socket and lends the command its own three descriptors, working directory and
variables. On a terminal the command gets one of its own, between which and the caller's the bytes are passed on, as the
usual ``sudo`` does with ``use_pty``. Signals are passed on too, the exit status comes back. Options and variables are
those of sudo(8); what is not offered is refused.

Started as a script by a wrapper that the agent wrote, with the socket as first argument; nothing of the sandbox's
libraries is imported, and of the standard one little: `dataclasses` and `pathlib` alone would double the time of a start.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import re
import resource
import select
import signal
import socket
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from typing import NoReturn, Self

if not __package__:
    # A script's own folder is not searched in isolated mode, nor should it be.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from sandgate_agent import frames

__all__ = ["main"]

#: Where the wrapper keeps the caller's LD_LIBRARY_PATH when the interpreter needs another.
LIBRARIES_OF_CALLER = "SANDGATE_LIBRARIES"

_USAGE = """\
usage: sudo [-EHinsS] [-u user] [--preserve-env[=list]] [VAR=value] [-i | -s] [command [argument ...]]
       sudo -v | -k | -l | -V
"""
#: Kept from the caller's variables, like the env_keep and env_check of the usual sudo.
_KEPT = re.compile(
    r"COLORS|COLORTERM|DISPLAY|HOSTNAME|LANG|LANGUAGE|LC_[A-Z]+|LS_COLORS|PATH|PS1|PS2|TERM|TZ|XAUTHORITY"
)
_FALLBACK_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=", re.ASCII)
#: Options to the flag that they set; None: no password is ever asked for, so they change nothing.
_FLAGS = {
    "-E": "preserve",
    "--preserve-env": "preserve",
    "-H": "set_home",
    "--set-home": "set_home",
    "-i": "login",
    "--login": "login",
    "-s": "shell",
    "--shell": "shell",
    "-v": "nothing",
    "--validate": "nothing",
    "-k": "forget",
    "--reset-timestamp": "forget",
    "-K": "nothing",
    "--remove-timestamp": "nothing",
    "-l": "listing",
    "--list": "listing",
    "-V": "version",
    "--version": "version",
    "-h": "help",
    "--help": "help",
    "-n": None,
    "--non-interactive": None,
    "-S": None,
    "--stdin": None,
    "-A": None,
    "--askpass": None,
}
_VALUES = {"-u": "user", "--user": "user", "-p": None, "--prompt": None}
#: What is passed on to the command. On a terminal the keys for some of them go there as bytes.
_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGCONT,
)
_READ_SIZE = 64 * 1024


class Refused(Exception):
    """One line for the caller."""


class Options:
    """The command line."""

    def __init__(self) -> None:
        self.user = "root"
        self.preserve = False
        self.preserved: set[str] = set()
        self.set_home = False
        self.login = False
        self.shell = False
        self.nothing = False
        self.forget = False
        self.listing = False
        self.version = False
        self.help = False
        self.assignments: dict[str, str] = {}
        self.command: list[str] = []

    @classmethod
    def parse(cls, words: Sequence[str]) -> Options:
        """Raises Refused for what is not offered."""
        options, rest = cls(), list(words)
        while rest and rest[0].startswith("-") and rest[0] != "-":
            word = rest.pop(0)
            if word == "--":
                break
            options._take(word, rest)
        while rest and _ASSIGNMENT.match(rest[0]):
            name, _, value = rest.pop(0).partition("=")
            options.assignments[name] = value
        options.command = rest
        return options

    def _take(self, word: str, rest: list[str]) -> None:
        name, equals, value = word.partition("=")
        if name == "--preserve-env" and equals:
            self.preserved.update(value.split(","))
        elif name.startswith("--") and equals and name in _VALUES:
            self._value(name, value)
        elif word in _VALUES:
            if not rest:
                raise Refused(f"option {word} needs a value")
            self._value(word, rest.pop(0))
        elif word in _FLAGS:
            self._flag(word)
        elif not word.startswith("--") and word[:2] in _VALUES:
            self._value(word[:2], word[2:])
        elif not word.startswith("--") and word[:2] in _FLAGS and len(word) > 2:
            self._flag(word[:2])
            self._take(f"-{word[2:]}", rest)
        else:
            raise Refused(f"option {word} is not offered in this sandbox")

    def _flag(self, option: str) -> None:
        if (name := _FLAGS[option]) is not None:
            setattr(self, name, True)

    def _value(self, option: str, value: str) -> None:
        if (name := _VALUES[option]) is not None:
            setattr(self, name, value)


def main(words: Sequence[str]) -> int:
    """The exit status; a command that a signal ended takes this process along."""
    address, *rest = words
    _restore_libraries()
    try:
        options = Options.parse(rest)
        if (done := _without_command(options)) is not None:
            return done
        return _leave(_run(address, _request(options)))
    except Refused as refusal:
        sys.stderr.write(f"sudo: {refusal}\n")
        return 1


def _restore_libraries() -> None:
    known = os.environ.pop(LIBRARIES_OF_CALLER, None)
    if known is not None:
        os.environ.pop("LD_LIBRARY_PATH", None)
        if known:
            os.environ["LD_LIBRARY_PATH"] = known


def _without_command(options: Options) -> int | None:
    """What needs no agent: the exit status; None when there is something to run."""
    if options.help:
        sys.stdout.write(_USAGE)
        return 0
    if options.version:
        sys.stdout.write("Sudo version 1.9.0 (sandgate)\n")
        return 0
    if options.listing:
        sys.stdout.write("This user may run the following commands in this sandbox:\n    (ALL : ALL) NOPASSWD: ALL\n")
        return 0
    if options.command or options.login or options.shell:
        return None
    if options.nothing or options.forget:
        return 0
    sys.stderr.write(_USAGE)
    return 1


def _request(options: Options) -> frames.Message:
    target = _account(options.user)
    command = _command(options, target)
    return {
        "user": target.pw_name,
        "argv": command,
        "env": _environment(options, target, command),
        "cwd": _directory(options, target),
    }


def _account(name: str) -> pwd.struct_passwd:
    try:
        number = name.removeprefix("#")
        return pwd.getpwuid(int(number)) if number != name else pwd.getpwnam(name)
    except (KeyError, ValueError, OverflowError):
        raise Refused(f"unknown user {name}") from None


def _command(options: Options, target: pwd.struct_passwd) -> list[str]:
    if not (options.login or options.shell):
        return options.command
    own = target.pw_shell or "/bin/sh"
    shell = [own, "-l"] if options.login else [os.environ.get("SHELL") or own]
    # What the shell must not take apart, except variables, which the caller may have quoted for it.
    line = " ".join(re.sub(r"([^A-Za-z0-9_$-])", r"\\\1", word) for word in options.command)
    return [*shell, "-c", line] if options.command else shell


def _directory(options: Options, target: pwd.struct_passwd) -> str:
    if options.login:
        return target.pw_dir if os.path.isdir(target.pw_dir) else "/"
    try:
        return os.getcwd()
    except OSError as error:
        raise Refused(f"the working directory is gone: {error.strerror}") from None


def _environment(options: Options, target: pwd.struct_passwd, command: Sequence[str]) -> dict[str, str]:
    keep_all = options.preserve and not options.login
    kept = {
        name: value
        for name, value in os.environ.items()
        if keep_all or name in options.preserved or _KEPT.fullmatch(name)
    }
    home_is_kept = (keep_all or "HOME" in options.preserved) and not options.set_home
    uid, gid = os.getuid(), os.getgid()
    return {
        "PATH": _FALLBACK_PATH,
        **kept,
        "HOME": kept.get("HOME", target.pw_dir) if home_is_kept else target.pw_dir,
        "USER": target.pw_name,
        "LOGNAME": target.pw_name,
        "SHELL": target.pw_shell or "/bin/sh",
        "SUDO_COMMAND": " ".join(command)[:4096],
        "SUDO_USER": _name_of(uid),
        "SUDO_UID": str(uid),
        "SUDO_GID": str(gid),
        **options.assignments,
    }


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"


def _run(address: str, request: frames.Message) -> int | None:
    """The wait status; None when it is not known."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(address)
        except OSError as error:
            raise Refused(f"the sandbox's agent cannot be asked: {error.strerror}") from None
        session = Session(sock)
        if not os.isatty(0):
            session.begin(request, (0, 1, 2))
            return session.attend()
        if not _in_foreground():
            # A job in the background that read the terminal would be stopped. The command is no job of it.
            with open(os.devnull, "rb") as nothing:
                session.begin(request, (nothing.fileno(), 1, 2))
            return session.attend()
        with OwnTerminal() as terminal:
            session.begin({**request, "terminal": True}, terminal.lent())
            terminal.close_slave()
            return session.attend(terminal)


def _in_foreground() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


class OwnTerminal:
    """The command's terminal, and the caller's, which passes every key on as it is meanwhile."""

    def __init__(self) -> None:
        self.master, self._slave = os.openpty()
        os.set_blocking(self.master, False)
        self._settings = termios.tcgetattr(0)
        termios.tcsetattr(self._slave, termios.TCSANOW, self._settings)
        self._pending = b""
        self._reading = True
        self._screen = next((number for number in (1, 2) if os.isatty(number)), 0)
        self.resize()

    def __enter__(self) -> Self:
        tty.setraw(0)
        return self

    def __exit__(self, *_: object) -> None:
        self.show_all()
        termios.tcsetattr(0, termios.TCSADRAIN, self._settings)

    def lent(self) -> tuple[int, ...]:
        """The command's three: its terminal, except where the caller has redirected."""
        return tuple(self._slave if os.isatty(number) else number for number in (0, 1, 2))

    def close_slave(self) -> None:
        os.close(self._slave)

    def resize(self) -> None:
        size = fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, size)

    def watch(self, poll: select.poll) -> None:
        poll.register(self.master, select.POLLIN | (select.POLLOUT if self._pending else 0))
        if self._reading and not self._pending:
            poll.register(0, select.POLLIN)

    def take(self, ready: dict[int, int], poll: select.poll) -> None:
        """Pass on what is there."""
        if ready.get(self.master, 0) & ~select.POLLOUT and not self.show():
            poll.unregister(self.master)
        if 0 in ready:
            poll.unregister(0)
            self._pending = _read(0)
            self._reading = bool(self._pending)
        if self._pending:
            self._pending = self._pending[_write_some(self.master, self._pending) :]

    def show(self) -> bool:
        """False when nobody will write any more."""
        data = _read(self.master)
        _write_all(self._screen, data)
        return bool(data)

    def show_all(self) -> None:
        while self.show():
            pass


class Session:
    """One request to the agent, until the command has ended."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = frames.Decoder()
        self._wake, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        for number in (*_SIGNALS, signal.SIGWINCH):
            signal.signal(number, lambda *_: None)

    def begin(self, request: frames.Message, fds: Sequence[int]) -> None:
        try:
            frames.write(self._sock, request, fds)
        except OSError:
            # A refusal may have come before all of it was sent.
            pass

    def attend(self, terminal: OwnTerminal | None = None) -> int | None:
        """Pass on bytes and signals until the agent tells how it ended. Raises Refused with the agent's reason."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            if terminal is not None:
                terminal.watch(poll)
            ready = dict(poll.poll())
            if self._wake in ready:
                self._pass_signals(terminal)
            if terminal is not None:
                terminal.take(ready, poll)
            if self._sock.fileno() in ready:
                for message in self._answers():
                    return message["exit"]  # type: ignore[no-any-return]

    def _answers(self) -> Iterator[frames.Message]:
        alive = frames.read(self._sock, self._decoder)
        for message, _ in self._decoder.messages():
            if "refused" in message:
                raise Refused(message["refused"])
            yield message
        if not alive:
            raise Refused("the sandbox's agent is gone")

    def _pass_signals(self, terminal: OwnTerminal | None) -> None:
        for number in set(os.read(self._wake, 4096)):
            if number == signal.SIGWINCH:
                if terminal is not None:
                    terminal.resize()
            else:
                self.begin({"signal": number}, ())


def _read(fd: int) -> bytes:
    """Empty when there is nothing now, or never will be."""
    try:
        return os.read(fd, _READ_SIZE)
    except OSError:
        return b""


def _write_some(fd: int, data: bytes) -> int:
    try:
        return os.write(fd, data)
    except BlockingIOError:
        return 0
    except OSError:
        # Nobody reads it any more.
        return len(data)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[_write_some(fd, data) :]
        if data:
            select.select([], [fd], [])


def _leave(status: int | None) -> int:
    if status is None:
        return 1
    if os.WIFSIGNALED(status):
        _die(os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


def _die(number: int) -> NoReturn:
    """End by the same signal, so that whoever waits for this process hears the same; without a core of this program."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        signal.signal(number, signal.SIG_DFL)
    except OSError as error:
        # SIGKILL has no handler to be taken away.
        if error.errno != errno.EINVAL:
            raise
    os.kill(os.getpid(), number)
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
