"""Who acts: names of callers to accounts of the sandbox's system (behaviour.md 2).

Looked up at every request, so that an account which an earlier command made works at once (U5).
"""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass

from sandgate_errors import Unauthenticated

__all__ = ["Account", "Accounts", "OwnerNames"]


@dataclass(frozen=True, kw_only=True)
class Account:
    """One user of the sandbox."""

    name: str
    uid: int
    gid: int
    #: Supplementary groups, the primary one included.
    groups: tuple[int, ...]
    home: str


class Accounts:
    """The accounts of this sandbox, under the identity that the agent was started with."""

    def __init__(self, identity: str, homes: Mapping[str, str]) -> None:
        self.identity = identity
        self._homes = dict(homes)

    @property
    def owns_files(self) -> bool:
        """Whether accounts differ in the file system: else the agent's own id stands for all of them."""
        return self.identity == "switch"

    def find(self, name: str) -> Account:
        """Raises Unauthenticated for a name that no account has (U3)."""
        account = self._named(name) if self.identity == "same" else self._of_system(name)
        if account is None:
            raise Unauthenticated(f"user '{_shown(name)}' does not exist")
        return account

    def _named(self, name: str) -> Account | None:
        home = self._homes.get(name)
        if home is None:
            return None
        return Account(name=name, uid=os.getuid(), gid=os.getgid(), groups=tuple(os.getgroups()), home=home)

    def _of_system(self, name: str) -> Account | None:
        try:
            entry = pwd.getpwnam(name)
        except (KeyError, ValueError, UnicodeEncodeError):
            # ValueError: a NUL in the name.
            return None
        groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
        return Account(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid, groups=groups, home=entry.pw_dir or "/")


class OwnerNames:
    """Numbers of owners to names, for the entries of one reply (F11).

    Where one id stands for all accounts, it is shown under the acting account's name: seen from its own namespace the
    files do belong to it.
    """

    def __init__(self, accounts: Accounts, acting: Account) -> None:
        self._users: dict[int, str] = {}
        self._groups: dict[int, str] = {}
        if not accounts.owns_files:
            self._users[os.getuid()] = acting.name
            self._groups[os.getgid()] = acting.name if acting.gid == os.getgid() else _group_name(acting.gid)

    def user(self, uid: int) -> str:
        name = self._users.get(uid)
        if name is None:
            name = self._users[uid] = _user_name(uid)
        return name

    def group(self, gid: int) -> str:
        name = self._groups.get(gid)
        if name is None:
            name = self._groups[gid] = _group_name(gid)
        return name


def _user_name(uid: int) -> str:
    try:
        return _shown(pwd.getpwuid(uid).pw_name)
    except (KeyError, OverflowError):
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return _shown(grp.getgrgid(gid).gr_name)
    except (KeyError, OverflowError):
        return str(gid)


def _shown(name: str) -> str:
    return name.encode(errors="replace").decode()
