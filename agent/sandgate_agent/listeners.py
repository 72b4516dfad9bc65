"""Whose listener a port of the loopback is, where a sandbox shares its network with others.

There, port 3000 of the loopback may belong to this sandbox, to a neighbour or to the machine, and a tunnel must reach the
first only. The kernel tells which sockets listen (proc(5), ``/proc/net/tcp``) and, in ``/proc/<pid>/fd``, who holds them;
ours are held by a descendant of the root spawner, which are all processes that were started here.

Between a look and a connection a listener can change hands. A socket's inode number is its own for as long as it lives:
the same one before and after means that it was there all the time (``tunnels.py`` looks twice). One that is gone the
second time may have served its only connection, as `nc -l` does: then whoever holds the other end of ours decides.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator

__all__ = ["LOOPBACK", "Listeners"]

#: The addresses that a tunnel is tried at, in this order. Wildcard listeners are reached by one of them (R7).
LOOPBACK = ("127.0.0.1", "::1")

_LISTENS = b"0A"
_MOST_REMEMBERED = 256


class Listeners:
    """Looks for listeners of the processes below ``root``. Methods block."""

    def __init__(self, root: int) -> None:
        self._root = root
        # Where a socket was found last: looking there first spares a walk through all descriptors of all processes.
        self._holders: dict[int, str] = {}

    def ours(self, address: str, port: int) -> frozenset[int]:
        """The inodes of what a connection to ``address`` meets; empty when nothing does, or anything that is not ours."""
        inodes = _met(address, port)
        return inodes if all(map(self._is_ours, inodes)) else frozenset()

    def still_ours(self, met: frozenset[int], address: str, port: int, *, caller: int) -> bool:
        """Whether a connection from the port ``caller`` reached what :meth:`ours` had found."""
        now = _met(address, port)
        if now == met:
            return True
        if accepted := _accepted(address, port, caller):
            return self._is_ours(accepted)
        # Nobody holds the other end any more: what it was told before is all that it will ever say.
        return not now

    def _is_ours(self, inode: int) -> bool:
        name = f"socket:[{inode}]"
        known = self._holders.get(inode)
        if known is not None and _target(known) == name:
            return True
        self._holders.pop(inode, None)
        for pid in _pids():
            link = _held(pid, name)
            if link is not None and self._descends(pid):
                if len(self._holders) >= _MOST_REMEMBERED:
                    self._holders.clear()
                self._holders[inode] = link
                return True
        return False

    def _descends(self, pid: int) -> bool:
        ancestor = pid
        while ancestor > 1 and ancestor != self._root:
            ancestor = _parent(ancestor)
        return ancestor == self._root


def _met(address: str, port: int) -> frozenset[int]:
    """The kernel prefers the exact address to a wildcard, and a wildcard of the address's own family."""
    if ":" in address:
        ranks = [("tcp6", address), ("tcp6", "::")]
    else:
        ranks = [("tcp", address), ("tcp6", f"::ffff:{address}"), ("tcp", "0.0.0.0"), ("tcp6", "::")]
    listening = {table: list(_listening(table, port)) for table in {table for table, _ in ranks}}
    for table, place in ranks:
        if met := frozenset(inode for found, inode in listening[table] if found == _hex(place)):
            return met
    return frozenset()


def _listening(table: str, port: int) -> Iterator[tuple[bytes, int]]:
    """Address, as the table writes it, and inode of what listens on the port."""
    suffix = b":%04X" % port
    for fields in _rows(table):
        if fields[3] != _LISTENS:
            return  # listeners come first, and a busy machine has many thousand connections
        if fields[1].endswith(suffix):
            yield fields[1][: -len(suffix)], int(fields[9])


def _accepted(address: str, port: int, caller: int) -> int:
    """The inode of the other end of a connection; 0 when it has none."""
    forms = [("tcp6", address)] if ":" in address else [("tcp", address), ("tcp6", f"::ffff:{address}")]
    for table, place in forms:
        ends = [b"%b:%04X" % (_hex(place), port), b"%b:%04X" % (_hex(place), caller)]
        if inode := next((int(fields[9]) for fields in _rows(table) if fields[1:3] == ends), 0):
            return inode
    return 0


def _rows(table: str) -> Iterator[list[bytes]]:
    path = f"/proc/self/net/{table}"
    if not os.path.exists(path):
        return  # a kernel without IPv6
    with open(path, "rb") as file:
        next(file)
        for line in file:
            yield line.split()


def _hex(address: str) -> bytes:
    """An address as the table writes it: words of the machine's own byte order."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    return b"".join(b"%08X" % word for (word,) in struct.iter_unpack("=I", packed))


def _held(pid: int, name: str) -> str | None:
    """The link in /proc by which the process holds what has this name."""
    folder = f"/proc/{pid}/fd"
    try:
        descriptors = os.listdir(folder)
    except OSError:
        return None  # gone, or of another user: not one of ours
    return next((link for fd in descriptors if _target(link := f"{folder}/{fd}") == name), None)


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name stands in parentheses and may hold any.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())
