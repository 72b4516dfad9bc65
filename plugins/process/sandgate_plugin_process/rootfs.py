"""The root file system of a sandbox: a small skeleton of its own on disk, into which the host's programs are bound.

On disk and writable, so that root of the sandbox may make a directory anywhere (``contract/behaviour.md`` F1) and the
files outlive the processes. What comes from the host is an allow list: ``/usr``, and of ``/etc`` only what programs
need to run. Files of ``/etc`` that differ between machines, hold secrets or name the operator are never among it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["USER_ID", "Owners", "binds", "build", "give_resolver", "mend"]

USER_ID = 1000
_ROOT_ID = 0

# A login shell keeps the PATH it was given (P14, P17): Debian's own profile would replace it.
_PROFILE = """\
if [ -n "${BASH_VERSION-}" ] && [ -n "${PS1-}" ] && [ -r /etc/bash.bashrc ]; then
    . /etc/bash.bashrc
fi
for part in /etc/profile.d/*.sh; do
    if [ -r "$part" ]; then
        . "$part"
    fi
done
unset part
"""
_BASHRC = """\
[ -n "${PS1-}" ] || return
shopt -s checkwinsize
PS1='\\u@\\h:\\w\\$ '
"""
_USER_PROFILE = """\
if [ -n "${BASH_VERSION-}" ] && [ -r ~/.bashrc ]; then
    . ~/.bashrc
fi
"""
_USER_BASHRC = """\
case $- in
    *i*) ;;
    *) return ;;
esac
HISTCONTROL=ignoreboth
"""
_PASSWD = f"""\
root:x:0:0:root:/root:/bin/bash
user:x:{USER_ID}:{USER_ID}::/home/user:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUP = f"""\
root:x:0:
tty:x:5:
user:x:{USER_ID}:
nogroup:x:65534:
"""
_HOSTS = """\
127.0.0.1 localhost sandbox
::1 localhost ip6-localhost ip6-loopback
"""
_NSSWITCH = """\
passwd: files
group: files
shadow: files
hosts: files dns
networks: files
protocols: files
services: files
"""

# path, mode, inner owner
_DIRECTORIES: tuple[tuple[str, int, int], ...] = (
    ("", 0o755, _ROOT_ID),
    ("dev", 0o755, _ROOT_ID),
    ("etc", 0o755, _ROOT_ID),
    ("etc/profile.d", 0o755, _ROOT_ID),
    ("home", 0o755, _ROOT_ID),
    ("home/user", 0o755, USER_ID),
    ("media", 0o755, _ROOT_ID),
    ("mnt", 0o755, _ROOT_ID),
    ("opt", 0o755, _ROOT_ID),
    ("proc", 0o755, _ROOT_ID),
    ("root", 0o700, _ROOT_ID),
    ("run", 0o755, _ROOT_ID),
    ("run/lock", 0o1777, _ROOT_ID),
    ("run/sandgate", 0o755, _ROOT_ID),
    ("run/sandgate/agent", 0o755, _ROOT_ID),
    ("run/sandgate/socket", 0o700, _ROOT_ID),
    ("srv", 0o755, _ROOT_ID),
    ("tmp", 0o1777, _ROOT_ID),
    ("usr", 0o755, _ROOT_ID),
    ("var", 0o755, _ROOT_ID),
    ("var/cache", 0o755, _ROOT_ID),
    ("var/lib", 0o755, _ROOT_ID),
    ("var/log", 0o755, _ROOT_ID),
    ("var/tmp", 0o1777, _ROOT_ID),
)
#: On which bubblewrap mounts what is not shared by a list: `/proc`, devices, the agent and its socket.
_MOUNTED = ("/proc", "/dev", "/run/sandgate/agent", "/run/sandgate/socket")
_LINKS = {"var/run": "/run", "var/lock": "/run/lock", "etc/mtab": "/proc/self/mounts"}
# path -> content, inner owner
_FILES: Mapping[str, tuple[str, int]] = {
    "etc/passwd": (_PASSWD, _ROOT_ID),
    "etc/group": (_GROUP, _ROOT_ID),
    "etc/hosts": (_HOSTS, _ROOT_ID),
    "etc/hostname": ("sandbox\n", _ROOT_ID),
    "etc/nsswitch.conf": (_NSSWITCH, _ROOT_ID),
    "etc/profile": (_PROFILE, _ROOT_ID),
    "etc/bash.bashrc": (_BASHRC, _ROOT_ID),
    "etc/shells": ("/bin/sh\n/bin/bash\n/usr/bin/bash\n", _ROOT_ID),
    "home/user/.profile": (_USER_PROFILE, USER_ID),
    "home/user/.bashrc": (_USER_BASHRC, USER_ID),
    "root/.profile": (_USER_PROFILE, _ROOT_ID),
    "root/.bashrc": (_USER_BASHRC, _ROOT_ID),
}

# Programs of the host outside /usr, on systems that have not merged them.
_PROGRAM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
# Small plain files of the host's /etc: copied, because each bind costs more than the copy.
_COPIED = (
    "debian_version",
    "ld.so.conf",
    "localtime",
    "lsb-release",
    "os-release",
    "protocols",
    "redhat-release",
    "services",
    "timezone",
)
# Folders and larger files of the host's /etc. Of `ssl` and `pki` only the public halves: a gateway's user may be in a
# group that may read private keys, and keeps its groups inside a user namespace.
_BOUND = (
    "alternatives",
    "crypto-policies",
    "fonts",
    "java*",
    "ld.so.cache",
    "ld.so.conf.d",
    "mime.types",
    "perl",
    "pki/ca-trust/extracted",
    "pki/java",
    "pki/tls/certs",
    "pki/tls/cert.pem",
    "pki/tls/openssl.cnf",
    "python3*",
    "ssl/certs",
    "ssl/openssl.cnf",
)
_COPY_LIMIT_BYTES = 256 * 1024


@dataclass(frozen=True)
class Owners:
    """Who the accounts of the sandbox are outside."""

    #: The outer id of the sandbox's id 0; None: everything belongs to the gateway's own user.
    base: int | None

    def give(self, path: Path, inner: int) -> None:
        if self.base is not None:
            os.chown(path, self.base + inner, self.base + inner, follow_symlinks=False)


def build(root: Path, owners: Owners, *, internet: bool, shared: Iterable[tuple[str, str]]) -> None:
    """Make the skeleton at ``root``, which must not exist, with a mount point for each of ``shared``. Blocks."""
    for name, mode, inner in _DIRECTORIES:
        path = root / name
        path.mkdir()
        path.chmod(mode)
        owners.give(path, inner)
    for name, target in {**_LINKS, **_host_links()}.items():
        path = root / name
        path.symlink_to(target)
        owners.give(path, _ROOT_ID)
    for name, (text, inner) in _FILES.items():
        _write(root / name, text.encode(), owners, inner)
    for name, content in _host_files().items():
        _write(root / name, content, owners, _ROOT_ID)
    _write(root / "etc/resolv.conf", _resolver() if internet else b"", owners, _ROOT_ID)
    for source, target in shared:
        _mount_point(root, target, owners, is_folder=os.path.isdir(source))


def mend(root: Path, owners: Owners, *, shared: Iterable[tuple[str, str]]) -> None:
    """Make every place that something is mounted on a plain file or folder again. Blocks; nothing may live in ``root``.

    The sandbox's root may have put links there, and whoever mounts follows them: to a path of the host. What is in the
    way is moved aside, under a name that says so, as it is the sandbox's own.
    """
    places = {**dict.fromkeys(_MOUNTED, True), **{target: os.path.isdir(source) for source, target in shared}}
    with _folder_at(os.fspath(root), None) as top:
        for place, is_folder in places.items():
            _mend_place(top, place.strip("/").split("/"), owners, is_folder=is_folder)


def give_resolver(root: Path, owners: Owners) -> None:
    """For files that come from a sandbox without network: the host's way to look names up, unless it made one of its own.

    Blocks; nothing may live in ``root``. Follows no link: what is not as it was made stays as the sandbox left it.
    """
    try:
        with _folder_at(os.fspath(root), None) as top, _folder_at("etc", top) as etc:
            found = os.stat("resolv.conf", dir_fd=etc, follow_symlinks=False)
            if stat.S_ISREG(found.st_mode) and not found.st_size:
                os.unlink("resolv.conf", dir_fd=etc)
                _make("resolv.conf", etc, owners, stat.S_IFREG, content=_resolver())
    except (FileNotFoundError, NotADirectoryError, FileExistsError):
        return
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise


def _mend_place(parent: int, names: Sequence[str], owners: Owners, *, is_folder: bool) -> None:
    name, rest = names[0], names[1:]
    wanted = stat.S_IFDIR if rest or is_folder else stat.S_IFREG
    if _kind_of(name, parent) not in {None, wanted}:
        os.rename(name, f"{name}.moved-{secrets.token_hex(4)}", src_dir_fd=parent, dst_dir_fd=parent)
    if _kind_of(name, parent) is None:
        _make(name, parent, owners, wanted)
    if rest:
        with _folder_at(name, parent) as folder:
            _mend_place(folder, rest, owners, is_folder=is_folder)


def _kind_of(name: str, parent: int) -> int | None:
    try:
        return stat.S_IFMT(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _make(name: str, parent: int, owners: Owners, kind: int, *, content: bytes = b"") -> None:
    if kind == stat.S_IFDIR:
        os.mkdir(name, 0o755, dir_fd=parent)
    else:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=parent)
        with open(descriptor, "wb") as file:
            file.write(content)
    if owners.base is not None:
        os.chown(name, owners.base, owners.base, dir_fd=parent, follow_symlinks=False)


@contextmanager
def _folder_at(name: str, parent: int | None) -> Iterator[int]:
    """A folder that is no link, opened to its owner: without privileges one can close a folder to oneself."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        folder = os.open(name, flags, dir_fd=parent)
    except PermissionError:
        os.chmod(name, stat.S_IRWXU, dir_fd=parent)
        folder = os.open(name, flags, dir_fd=parent)
    try:
        mode = stat.S_IMODE(os.fstat(folder).st_mode)
        if mode & stat.S_IRWXU != stat.S_IRWXU:
            os.fchmod(folder, mode | stat.S_IRWXU)
        yield folder
    finally:
        os.close(folder)


@cache
def binds() -> Sequence[tuple[str, str]]:
    """(host path, path in the sandbox) of all that is shared, to be bound read-only.

    Looked up once: the host's system does not change its layout under a running gateway.
    """
    return tuple(_find_binds())


def _find_binds() -> Iterator[tuple[str, str]]:
    yield "/usr", "/usr"
    for name in _PROGRAM_FOLDERS:
        path = Path("/", name)
        if path.is_dir() and not path.is_symlink():
            yield str(path), str(path)
    for pattern in _BOUND:
        for path in sorted(Path("/etc").glob(pattern)):
            if (real := _real(path)) is not None:
                yield real, str(path)


def _mount_point(root: Path, target: str, owners: Owners, *, is_folder: bool) -> None:
    """Made here and not by bubblewrap, which makes missing parents for the host's root alone."""
    path = root / target.lstrip("/")
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    for folder in reversed(missing):
        if folder == path and not is_folder:
            _write(path, b"", owners, _ROOT_ID)
        else:
            folder.mkdir()
            folder.chmod(0o755)
            owners.give(folder, _ROOT_ID)


def _real(path: Path) -> str | None:
    """What a bind of ``path`` shows; None when it leads nowhere or is not open to everybody."""
    try:
        real = path.resolve(strict=True)
        return str(real) if real.stat().st_mode & 0o004 else None
    except OSError:
        return None


def _write(path: Path, content: bytes, owners: Owners, inner: int) -> None:
    path.write_bytes(content)
    path.chmod(0o644)
    owners.give(path, inner)


@cache
def _host_links() -> Mapping[str, str]:
    """Where the host's program folders are links into /usr, the sandbox has the same links."""
    return {
        name: os.readlink(path) for name in _PROGRAM_FOLDERS if (path := Path("/", name)).is_symlink() and path.is_dir()
    }


@cache
def _host_files() -> Mapping[str, bytes]:
    found: dict[str, bytes] = {}
    for name in _COPIED:
        path = Path("/etc", name)
        real = _real(path)
        if real is not None and Path(real).is_file() and Path(real).stat().st_size <= _COPY_LIMIT_BYTES:
            found[f"etc/{name}"] = Path(real).read_bytes()
    return found


def _resolver() -> bytes:
    try:
        return Path("/etc/resolv.conf").read_bytes()
    except OSError:
        return b""
