"""Images for tests that need no registry: root file systems made here, brought into the engine by import.

An image belongs to one run of pytest. Its workers share it: whoever needs it first makes it, whoever is last to leave removes
it. The one root that takes long to make, a Debian by debootstrap, is kept between runs as an archive in the user's cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn

from sandgate_testing import execd_stand_in
from sandgate_testing.engine import docker

__all__ = ["ImageFailed", "Images"]

#: Seconds; guards against a tool that hangs.
_PATIENCE = 120.0
#: What tests run in a sandbox besides what every Debian has.
_PACKAGES = ("curl", "procps", "python3")
_UNUSED = ("./dev/*", "./proc/*", "./sys/*", "./var/cache/apt/*", "./var/lib/apt/lists/*", "./usr/share/doc/*")
_UNUSED_LANGUAGES = ("./usr/share/man/*", "./usr/share/locale/*", "./var/log/*", "./var/cache/debconf/*-old")
_DEBOOTSTRAP_SECONDS = 600.0
_REPOSITORY = "sandgate-test"
#: In front of a run's name: a file that its workers hold together, and nobody any more when they are gone.
_LOCK = "run-"
_APPLETS = [
    "[",
    "awk",
    "basename",
    "cat",
    "chmod",
    "chown",
    "cp",
    "cut",
    "date",
    "dd",
    "dirname",
    "du",
    "echo",
    "env",
    "expr",
    "false",
    "find",
    "grep",
    "head",
    "id",
    "kill",
    "ln",
    "ls",
    "mkdir",
    "mkfifo",
    "mktemp",
    "mount",
    "mv",
    "nc",
    "nohup",
    "pgrep",
    "pidof",
    "pkill",
    "printf",
    "ps",
    "pwd",
    "readlink",
    "rm",
    "rmdir",
    "sed",
    "seq",
    "setsid",
    "sh",
    "sleep",
    "sort",
    "stat",
    "stty",
    "tail",
    "tar",
    "tee",
    "test",
    "timeout",
    "touch",
    "tr",
    "true",
    "tty",
    "umount",
    "uname",
    "uniq",
    "wc",
    "wget",
    "which",
    "whoami",
    "xargs",
    "yes",
]


#: The first program of an OpenSandbox sandbox: execd beside what the sandbox is for, whose end ends both.
_BOOTSTRAP = """#!/bin/sh
/opt/opensandbox/execd &
execd=$!
"$@" &
program=$!
trap 'kill $program $execd' TERM INT
wait $program
status=$?
kill $execd
exit $status
"""


class ImageFailed(Exception):
    """A root could not be made; the text says why."""


def _give_up(reason: str) -> NoReturn:
    raise ImageFailed(reason)


class Images:
    """The images of one run. What one method cannot make goes to ``failed``, which may skip a test."""

    def __init__(self, run: str, failed: Callable[[str], NoReturn]) -> None:
        self._run = run
        self._failed = failed

    @classmethod
    @contextmanager
    def of_this_run(cls, failed: Callable[[str], NoReturn] = _give_up) -> Iterator[Images]:
        """They are there while the block of any worker runs."""
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
        _clear_after_others()
        lock = _join(_cache() / f"{_LOCK}{run}")
        images = cls(run, failed)
        try:
            yield images
        finally:
            _leave(lock)

    def debian(self, *changes: str) -> str:
        """This machine's release of Debian or Ubuntu, with Python. ``changes`` as of ``docker import --change``."""
        return self._image("debian", _debian, changes)

    def busybox(self, *changes: str) -> str:
        """A static busybox under the usual names, no account, no profile, no library."""
        return self._image("busybox", functools.partial(_packed, _busybox), changes)

    def musl(self, *changes: str) -> str:
        """The same with the C library of musl, its loader and an /etc/passwd of its own."""
        return self._image("musl", functools.partial(_packed, _musl), changes)

    def execd(self) -> str:
        """What an OpenSandbox server takes its program for sandboxes from; ours is a stand-in (``execd_stand_in``)."""
        return self._image("execd", functools.partial(_packed, _execd), ())

    def empty(self, *changes: str) -> str:
        """Nothing but a folder."""
        return self._image("empty", functools.partial(_packed, lambda _: None), changes)

    def _image(self, root: str, make: Callable[[], IO[bytes]], changes: tuple[str, ...]) -> str:
        about = hashlib.sha256("\0".join(changes).encode()).hexdigest()[:8]
        reference = f"{_REPOSITORY}/{root}:{_tag(self._run)}-{about}"
        with _locked(_cache() / "images.lock"):
            if docker("image", "inspect", reference, check=False).returncode != 0:
                options = [word for change in changes for word in ("--change", change)]
                try:
                    archive = make()
                except ImageFailed as error:
                    self._failed(str(error))
                with archive:
                    docker("import", *options, "-", reference, data=archive)
        return reference


def _leave(lock: IO[bytes]) -> None:
    """Remove the images of the run that ``lock`` stands for, unless a worker of it still has its share."""
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        pattern = f"reference={_REPOSITORY}/*:{_tag(Path(lock.name).name.removeprefix(_LOCK))}-*"
        listing = ("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", "--filter", pattern)
        if names := docker(*listing, check=False).stdout.split():
            _remove_containers(names)
            docker("image", "rm", "-f", *names, check=False)
        # What a container still uses is the next run's to remove.
        if not docker(*listing, check=False).stdout.split():
            Path(lock.name).unlink(missing_ok=True)


def _remove_containers(images: Iterable[str]) -> None:
    """Of programs that were killed, such as the helper of an OpenSandbox server: nobody else knows of those."""
    of_these = [word for image in images for word in ("--filter", f"ancestor={image}")]
    if left := docker("ps", "-aq", *of_these, check=False).stdout.split():
        docker("rm", "-f", "-v", *left, check=False)


def _tag(run: str) -> str:
    return run[:16]


def _clear_after_others() -> None:
    """Remove what is left of runs that were killed."""
    for path in _cache().glob(f"{_LOCK}*"):
        with contextlib.suppress(FileNotFoundError):
            _leave(path.open("rb"))


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "sandgate-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _join(path: Path) -> IO[bytes]:
    """A shared lock on ``path``, which whoever leaves last removes."""
    while True:
        lock = path.open("ab")
        fcntl.flock(lock, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(lock.fileno()).st_ino:
                return lock
        lock.close()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _packed(fill: Callable[[Path], None]) -> IO[bytes]:
    """An archive of what ``fill`` puts into a folder; a file, as a pipe would have to be fed meanwhile."""
    archive = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    with tempfile.TemporaryDirectory(prefix="sandgate-root-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        fill(root)
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(root, arcname=".", filter=_owned_by_root)
    archive.seek(0, io.SEEK_SET)
    return archive


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _busybox(root: Path) -> None:
    program = shutil.which("busybox")
    if program is None or _is_dynamic(program):
        raise ImageFailed("there is no static busybox for images: apt-get install busybox-static")
    for name in ("bin", "tmp", "proc", "etc"):
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    shutil.copyfile(program, root / "bin/busybox")
    (root / "bin/busybox").chmod(0o755)
    for name in _APPLETS:
        (root / "bin" / name).symlink_to("busybox")


def _is_dynamic(program: str) -> bool:
    """Whether it names a loader, which stands near its beginning."""
    with open(program, "rb") as file:
        return b"/ld-" in file.read(4096)


def _musl(root: Path) -> None:
    loader = next(Path("/lib").glob("ld-musl-*.so.1"), None)
    if loader is None:
        raise ImageFailed("there is no musl for images: apt-get install musl")
    _busybox(root)
    (root / "lib").mkdir()
    # The loader and the library are one file.
    shutil.copyfile(loader.resolve(), root / "lib" / loader.name)
    (root / "lib" / loader.name).chmod(0o755)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nother:x:1000:1000::/home/other:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nother:x:1000:\n")


def _execd(root: Path) -> None:
    _busybox(root)
    execd_stand_in.pack(root / "execd")
    (root / "bootstrap.sh").write_text(_BOOTSTRAP)
    for name in ("execd", "bootstrap.sh"):
        (root / name).chmod(0o755)


def _debian() -> IO[bytes]:
    """The archive from the cache, made if it is not there. The caller holds the lock."""
    release = _release()
    recipe = repr((release, _PACKAGES, _UNUSED, _UNUSED_LANGUAGES))
    archive = _cache() / f"debian-{release}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}.tar"
    if not archive.exists():
        for outdated in _cache().glob("debian-*.tar"):
            outdated.unlink()
        _bootstrap(release, archive)
    return archive.open("rb")


def _release() -> str:
    with open("/etc/os-release", encoding="utf-8") as file:
        known = dict(line.rstrip("\n").split("=", 1) for line in file if "=" in line)
    if "VERSION_CODENAME" not in known or shutil.which("debootstrap") is None or os.geteuid() != 0:
        raise ImageFailed("a Debian root takes root's rights, Debian or Ubuntu and debootstrap")
    return known["VERSION_CODENAME"].strip('"')


def _bootstrap(release: str, archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="sandgate-debian-") as folder:
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", release, folder]
        _run([*command, *_source(release)], seconds=_DEBOOTSTRAP_SECONDS)
        draft = archive.with_suffix(f".{os.getpid()}")
        excluded = [f"--exclude={pattern}" for pattern in (*_UNUSED, *_UNUSED_LANGUAGES)]
        try:
            _run(["tar", "-C", folder, *excluded, "-cf", str(draft), "."], seconds=_PATIENCE)
            draft.replace(archive)
        finally:
            draft.unlink(missing_ok=True)


def _run(command: list[str], *, seconds: float) -> None:
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ImageFailed(f"{command[0]} did not end within {seconds:g} s") from None
    except subprocess.CalledProcessError as error:
        said = (error.stdout + error.stderr).decode(errors="replace").splitlines()
        raise ImageFailed(f"{command[0]} failed: {' | '.join(said[-5:])}") from None


def _source(release: str) -> list[str]:
    """Where this machine itself gets its packages from; nothing where it does not say: then debootstrap knows one."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", f"Codename: {release}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    return done.stdout.split()[:1]
