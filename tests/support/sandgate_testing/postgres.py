"""A PostgreSQL server of the tests' own: a real one from the installed packages, on a unix socket in a folder of its own.

One server serves one test process; each test gets a database of its own in it. The server refuses to run as root, so as
root it runs under an unprivileged account. It is told to end by the kernel when its test process is gone, however that went.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]

__all__ = ["PostgresServer", "programs"]

#: Where Debian and Ubuntu keep the server's programs, which are not on PATH.
_PACKAGES = Path("/usr/lib/postgresql")
_ROLE = "sandgate"
#: Seconds; guards against a server that hangs.
_PATIENCE = 60.0
#: Nothing of a test has to survive a power cut, and thirty connections are more than any test opens.
_FAST = ("fsync=off", "full_page_writes=off", "synchronous_commit=off", "autovacuum=off", "max_connections=40")


def programs() -> Path | None:
    """The folder with ``initdb`` and ``postgres``, of the newest version there is."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    versions = (path for path in _PACKAGES.glob("*/bin") if (path / "initdb").exists())
    return max(versions, key=lambda path: float(path.parent.name), default=None)


class PostgresServer:
    """A server that runs."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self._folder = folder
        self._process = process
        self._numbers = itertools.count(1)

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[PostgresServer]:
        """Serves while the block runs, and leaves nothing behind."""
        found = programs()
        assert found is not None, "need('postgres') comes first"
        # Short: a unix socket's path has 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix="sgpg-"))
        try:
            if os.geteuid() == 0:
                account = _account()
                os.chown(folder, account.pw_uid, account.pw_gid)
            subprocess.run(
                [*_unprivileged(), str(found / "initdb"), "-D", str(folder / "data"), "-U", _ROLE, "-A", "trust", "-N",
                 "-E", "UTF8", "--locale=C"],
                check=True, capture_output=True, timeout=_PATIENCE, cwd=folder,
            )  # fmt: skip
            process = _start(found, folder)
            try:
                _await_ready(found, folder, process)
                yield cls(folder, process)
            finally:
                _end(process)
            _check_sound(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def end(self) -> None:
        """The server is gone before its time."""
        _end(self._process)

    async def new_database(self) -> str:
        """The URL of an empty database."""
        name = f"t{next(self._numbers)}"
        await self._execute(f"CREATE DATABASE {name} TEMPLATE template0")
        return f"postgresql://{_ROLE}@/{name}?host={self._folder}"

    async def drop(self, url: str) -> None:
        """Remove a database; whoever is still connected to it is cut off."""
        await self._execute(f"DROP DATABASE {self._name_of(url)} WITH (FORCE)")

    async def cut_connections(self, url: str) -> None:
        """End every connection to a database, as a server that is restarted does."""
        await self._execute(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{self._name_of(url)}'"
        )

    @staticmethod
    def _name_of(url: str) -> str:
        return url.partition("@/")[2].partition("?")[0]

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(host=str(self._folder), user=_ROLE, database="postgres")
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    # "Immediate": the folder goes away with it.
    process.send_signal(signal.SIGQUIT)
    process.wait(timeout=_PATIENCE)


def _check_sound(folder: Path) -> None:
    """A server that crashed and came back would make some test fail without a reason that it could show."""
    log = (folder / "log").read_text(errors="replace")
    if "was terminated by signal" in log or "PANIC" in log:
        raise RuntimeError(f"PostgreSQL crashed: {log[-4000:]}")


def _account() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def _unprivileged() -> list[str]:
    """What runs a program as an ordinary user; the kernel's signal at our end is set after the change of user."""
    command = ["setpriv", "--pdeathsig", "QUIT"]
    if os.geteuid() == 0:
        account = _account()
        command += [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
    return [*command, "--"]


def _start(found: Path, folder: Path) -> subprocess.Popen[bytes]:
    settings = [word for setting in _FAST for word in ("-c", setting)]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [*_unprivileged(), str(found / "postgres"), "-D", str(folder / "data"), "-k", str(folder), "-h", "", *settings],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder,
        )  # fmt: skip


def _await_ready(found: Path, folder: Path, process: subprocess.Popen[bytes]) -> None:
    command = [str(found / "pg_isready"), "-q", "-h", str(folder), "-U", _ROLE, "-t", "1"]
    for _ in range(round(_PATIENCE)):
        for _ in range(20):
            if subprocess.run(command, check=False, timeout=_PATIENCE).returncode == 0:
                return
            if process.poll() is not None:
                raise RuntimeError(f"PostgreSQL did not start: {(folder / 'log').read_text()[-2000:]}")
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
    raise RuntimeError("PostgreSQL was not ready in time")
