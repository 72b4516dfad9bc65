"""What every sandbox has, whatever its image: folders, the account ``user``, a login profile that keeps the PATH.

For programs that run as root of a sandbox before its agent, on a file system of its own (the backends' ``enter.py``). With
nothing but the standard library; what is there already stays as it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping

__all__ = ["SHELL", "accounts_with_user", "furnish", "profile_around"]

_NAME = "user"
_UID = 1000
_HOME = "/home/user"
SHELL = "/bin/sh"
_PROFILE = "/etc/profile"
_MARK = "# A login shell keeps the PATH it was given; what a profile has to say is no output of a command.\n"


def furnish(account: Mapping[str, int], *, acting: str, workdir: str) -> None:
    """What every sandbox has, whatever its image; ``acting`` is who acts where a call names nobody."""
    if workdir:
        # As the engine does for whoever starts in it.
        _make_folder(workdir, 0o755)
    _make_folder("/tmp", 0o1777)  # noqa: S108 - the sandbox's own
    _make_folder("/root", 0o700)
    _make_folder("/home", 0o755)
    users = _make_account(account)
    for entry in users:
        if entry[0] in {_NAME, acting} and entry[0] != "root" and len(entry) > 5 and entry[5].startswith("/"):
            _make_home(entry[5], int(entry[2]), int(entry[3]))
    with _if_writable():
        _keep_path()


@contextlib.contextmanager
def _if_writable() -> Iterator[None]:
    """Where the root file system cannot be written, the backend has put in place what is needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.EROFS, errno.EBUSY}:
            raise


def _make_account(wanted: Mapping[str, int]) -> list[list[str]]:
    """The accounts of the system. ``user`` is made where the image lacks it."""
    shell = "/bin/bash" if os.path.exists("/bin/bash") else SHELL
    users, groups = _read("/etc/passwd"), _read("/etc/group")
    new_users, new_groups = accounts_with_user(users, groups, wanted=wanted, shell=shell)
    os.makedirs("/etc", exist_ok=True)
    # The group first: an account without its group would be half an account.
    _append("/etc/group", new_groups[len(groups) :])
    if new_users != users and os.path.exists("/etc/shadow"):
        # Without a password, and never too old: what PAM asks of an account.
        _append("/etc/shadow", _ended(_read("/etc/shadow"), f"{_NAME}:!:19000:0:99999:7:::\n"))
    _append("/etc/passwd", new_users[len(users) :])
    return _entries(new_users)


def accounts_with_user(users: str, groups: str, *, wanted: Mapping[str, int], shell: str) -> tuple[str, str]:
    """The texts of passwd and group with ``user`` behind what they had.

    With the ids ``wanted``, where the image asks for numbers that have no name; else with 1000, or the next that is free.
    """
    known = _entries(users)
    if any(entry[0] == _NAME for entry in known):
        return users, groups
    if not known:
        users += _ended(users, "root:x:0:0:root:/root:/bin/sh\n")
    if not _entries(groups):
        groups += _ended(groups, "root:x:0:\n")
    uid = wanted.get("uid", _free(known))
    named = next((int(entry[2]) for entry in _entries(groups) if entry[0] == _NAME), None)
    gid = wanted.get("gid", named)
    if gid is None:
        gid = uid if all(entry[2] != str(uid) for entry in _entries(groups)) else _free(_entries(groups))
    if named is None:
        groups += _ended(groups, f"{_NAME}:x:{gid}:\n")
    return users + _ended(users, f"{_NAME}:x:{uid}:{gid}::{_HOME}:{shell}\n"), groups


def profile_around(profile: str) -> str:
    """A profile that does what ``profile`` does, except for what a login shell's caller has to be spared (B17)."""
    if profile.startswith(_MARK):
        return profile
    return (
        f"{_MARK}_given_path=$PATH\n_image_profile() {{\n:\n{profile}\n}}\n"
        "case $- in\n*i*) _image_profile ;;\n*) _image_profile >/dev/null 2>&1 ;;\nesac\n"
        "PATH=$_given_path\nexport PATH\nunset _given_path\nunset -f _image_profile\n"
    )


def _entries(text: str) -> list[list[str]]:
    """Lines of at least three fields, the third a number."""
    fields = (line.split(":") for line in text.splitlines())
    return [each for each in fields if len(each) >= 3 and each[2].isdigit()]


def _free(entries: list[list[str]]) -> int:
    taken = {entry[2] for entry in entries}
    return next(number for number in range(_UID, _UID + 65536) if str(number) not in taken)


def _ended(text: str, more: str) -> str:
    """``more``, to be put behind ``text``, whose last line may have no end."""
    return more if not text or text.endswith("\n") else f"\n{more}"


def _read(path: str) -> str:
    """Empty when there is no such file."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _append(path: str, text: str) -> None:
    if text:
        with open(path, "a", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)


def _make_home(home: str, uid: int, gid: int) -> None:
    new = _make_folder(home, 0o755)
    with _if_writable():
        if new or (os.stat(home).st_uid == 0 and uid != 0 and home == _HOME):
            # Also what the engine has made as a place to mount something.
            os.chown(home, uid, gid)
            _fill_home(home, uid, gid)


def _fill_home(home: str, uid: int, gid: int) -> None:
    """The files that a new account of this image gets."""
    if not os.path.isdir("/etc/skel"):
        return
    for name in os.listdir("/etc/skel"):
        source, target = f"/etc/skel/{name}", f"{home}/{name}"
        if stat.S_ISREG(os.lstat(source).st_mode) and not os.path.lexists(target):
            with open(source, "rb") as file:
                _write(target, file.read(), stat.S_IMODE(os.lstat(source).st_mode))
            os.chown(target, uid, gid)


def _keep_path() -> None:
    if not os.path.isfile(_PROFILE):
        return
    old = _read(_PROFILE)
    if (new := profile_around(old)) != old:
        # Beside the old one, which may be a link to something that others use too.
        os.unlink(_PROFILE)
        _write(_PROFILE, new.encode(errors="surrogateescape"), 0o644)


def _write(path: str, data: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(fd, "wb") as file:
        file.write(data)


def _make_folder(path: str, mode: int) -> bool:
    """Whether it was not there and is now."""
    if os.path.isdir(path):
        return False
    with _if_writable():
        os.makedirs(path)
        os.chmod(path, mode)
        return True
    return False
