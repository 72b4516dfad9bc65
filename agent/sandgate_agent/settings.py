"""The line of JSON that a backend starts the agent with (docs/architecture.md, "The agent's start")."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

__all__ = ["BadSettings", "Groups", "Identification", "Settings", "read_line"]

_IDENTITIES = ("switch", "nested", "same")
_NETWORKS = ("own", "shared")
_LONGEST_LINE = 1024 * 1024
#: sockaddr_un takes 108 bytes with the closing NUL.
_LONGEST_SOCKET_PATH = 107
_LARGEST_PORT = 65535
#: The descriptors before it are the starter's.
_FIRST_OWN = 3


class BadSettings(Exception):
    """One line for whoever wrote the backend."""


@dataclass(frozen=True, kw_only=True)
class Identification:
    """What an agent proves itself with to its callers; PEM."""

    certificate: str
    key: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Inherited descriptors: who writes ``0`` to one moves into a control group, whatever it may do otherwise (P7)."""

    #: Of everything from which commands are started.
    commands: tuple[int, ...] = ()
    #: Of each terminal, on top.
    terminals: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Field names are those of the line."""

    listen: str
    token: str = field(repr=False)
    identity: str
    #: Name to home; only with the identity ``same``.
    accounts: Mapping[str, str] = field(default_factory=dict)
    system_files: bool = False
    #: The folder for the program ``sudo`` and its socket; None: there is none.
    sudo: str | None = None
    #: Whether the network is this sandbox's alone. Where it is not, a tunnel reaches what its own processes listen on.
    network: str = "shared"
    #: Ports of the sandbox to which no tunnel leads: what the platform itself listens on there.
    closed_ports: frozenset[int] = frozenset()
    #: The descriptor of the folder in which ``listen`` is, where that folder has no path in the sandbox; None: it has one.
    folder: int | None = None
    #: What ``listen`` is served with; None: without TLS.
    tls: Identification | None = None
    #: What the sandbox's user starts is put into.
    groups: Groups = Groups()
    #: How many processes and threads an account may have, kept by rlimit; None: no such limit.
    processes: int | None = None
    #: Controller to the folder of the control group that counts for the whole sandbox; empty: it is to be looked for.
    measured: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, line: bytes) -> Settings:
        """Raises BadSettings for anything that is not exactly what the document says."""
        try:
            given = json.loads(line)
        except ValueError:
            raise BadSettings("the settings are not a line of JSON") from None
        if not isinstance(given, dict):
            raise BadSettings("the settings are not a JSON object")
        if unknown := given.keys() - {known.name for known in fields(cls)}:
            raise BadSettings(f"unknown setting '{min(unknown)}'")
        settings = cls(
            listen=_text(given, "listen"),
            token=_text(given, "token"),
            identity=_text(given, "identity"),
            accounts=_homes(given.get("accounts")),
            system_files=_flag(given, "system_files"),
            sudo=_text(given, "sudo") if given.get("sudo") is not None else None,
            network=_text(given, "network") if given.get("network") is not None else cls.network,
            closed_ports=_ports(given.get("closed_ports")),
            folder=_descriptor(given.get("folder")),
            tls=_identification(given.get("tls")),
            groups=_groups(given.get("groups")),
            processes=_count(given.get("processes")),
            measured=_folders(given.get("measured")),
        )
        settings.check()
        return settings

    def check(self) -> None:
        if self.identity not in _IDENTITIES:
            raise BadSettings(f"identity is '{self.identity}' and not one of {', '.join(_IDENTITIES)}")
        if self.network not in _NETWORKS:
            raise BadSettings(f"network is '{self.network}' and not one of {', '.join(_NETWORKS)}")
        if bool(self.accounts) != (self.identity == "same"):
            raise BadSettings("accounts belong to the identity 'same', which needs at least one")
        if self.identity != "same" and os.geteuid() != 0:
            raise BadSettings(f"the identity '{self.identity}' needs an agent that is root in its namespace")
        if self.sudo is not None and (self.identity == "same" or not self.sudo.startswith("/")):
            raise BadSettings("sudo is an absolute path, and not for the identity 'same', where all are one user")
        if self.folder is not None and not self.listen.startswith(f"unix:/proc/self/fd/{self.folder}/"):
            raise BadSettings("folder is the descriptor through which listen goes: unix:/proc/self/fd/<folder>/<name>")
        if self.tls is not None and self.listen.startswith("unix:"):
            raise BadSettings("tls is for an agent that listens on a port")
        _check_address(self.listen)


def _check_address(address: str) -> None:
    path = address.removeprefix("unix:")
    if path != address:
        if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
            raise BadSettings(f"the socket's path is longer than {_LONGEST_SOCKET_PATH} bytes")
        return
    host, _, port = address.rpartition(":")
    # gRPC would take a larger number modulo 65536.
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) <= _LARGEST_PORT:
        raise BadSettings(f"listen is '{address}' and neither unix:<path> nor <host>:<port>")


def read_line(fd: int) -> bytes:
    """The line, and nothing behind it."""
    line = b""
    while not line.endswith(b"\n") and len(line) <= _LONGEST_LINE:
        if not (data := os.read(fd, 65536)):
            break
        line += data
    return line


def _text(given: Mapping[str, object], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value:
        raise BadSettings(f"{name} is missing or not a text")
    return value


def _flag(given: Mapping[str, object], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise BadSettings(f"{name} is not true or false")
    return value


def _descriptor(given: object) -> int | None:
    if given is None:
        return None
    if not isinstance(given, int) or isinstance(given, bool) or given < _FIRST_OWN:
        raise BadSettings("folder is not the number of a descriptor")
    return given


def _groups(given: object) -> Groups:
    if given is None:
        return Groups()
    if not isinstance(given, dict) or not given.keys() <= {"commands", "terminals"}:
        raise BadSettings("groups is not an object of commands and terminals")
    return Groups(commands=_descriptors(given.get("commands", [])), terminals=_descriptors(given.get("terminals", [])))


def _descriptors(given: object) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(type(number) is int and number >= _FIRST_OWN for number in given):
        raise BadSettings("groups are not lists of descriptors")
    return tuple(given)


def _count(given: object) -> int | None:
    if given is not None and (type(given) is not int or given < 1):
        raise BadSettings("processes is not a number from 1")
    return given if isinstance(given, int) else None


def _folders(given: object) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(
        isinstance(path, str) and path.startswith("/") for path in given.values()
    ):
        raise BadSettings("measured is not an object of absolute paths")
    return dict(given)


def _ports(given: object) -> frozenset[int]:
    if given is None:
        return frozenset()
    if not isinstance(given, list) or not all(isinstance(port, int) and 0 < port <= _LARGEST_PORT for port in given):
        raise BadSettings("closed_ports is not a list of ports")
    return frozenset(given)


def _identification(given: object) -> Identification | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise BadSettings("tls is not an object")
    return Identification(certificate=_text(given, "certificate"), key=_text(given, "key"))


def _homes(given: object) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise BadSettings("accounts is not an object")
    homes = {}
    for name, account in given.items():
        home = account.get("home") if isinstance(account, dict) else None
        if not isinstance(home, str) or not home.startswith("/") or not name:
            raise BadSettings(f"account '{name}' has no absolute home")
        homes[name] = home
    return homes
