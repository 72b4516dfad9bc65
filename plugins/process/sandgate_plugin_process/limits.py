"""What one sandbox may use, and the files of its control groups that say so.

A box has groups in every hierarchy that limits something (cgroups(7), the kernel's cgroup-v1 and cgroup-v2)::

    <box>                   what the whole sandbox may use; pause and destroy act on it
    <box>/agent             the agent and what holds the sandbox together
    <box>/user              what the sandbox's user started: less memory and fewer processes than the whole (P7)
    <box>/user/commands     with a quarter of the weight of
    <box>/user/terminals    when both want the CPU

Each has a tenth of the weight of the gateway, which starts, ends and asks all of them and needs little itself: deadlines are
kept and calls answered however many boxes want the CPU. Not where boxes would come behind the machine's other programs too.

A version 1 hierarchy without the CPU has no need of the last two, nor of ``agent``: processes may stay in ``<box>`` itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LIMITING", "USEFUL", "Limits", "folders", "leaf", "settings"]

#: Controllers that limit what a sandbox uses.
LIMITING = frozenset({"memory", "pids", "cpu"})
#: These and the one of version 1 that only counts.
USEFUL = LIMITING | {"cpuacct"}

_MIB = 2**20
#: Of its memory a sandbox's user may not have the smaller of an eighth and this (P7).
_AGENTS_MEMORY = 128 * _MIB
#: Processes and threads beside the user's: the agent has up to some fifty.
_AGENTS_PIDS = 256
_PERIOD_MICROSECONDS = 100_000
#: Weights of version 2; 100 there is 1024 in version 1.
_BEHIND_GATEWAY = 10
_WEIGHTS = {"agent": 200, "user": 50, "user/commands": 50, "user/terminals": 200}
_SHARES_PER_WEIGHT = 1024 / 100


@dataclass(frozen=True, kw_only=True)
class Limits:
    """None: as much as the machine has."""

    #: Processes and threads of the user.
    pids: int
    #: Bytes, of the whole sandbox.
    memory: int | None
    #: Bytes, of the whole machine or of what the gateway may use of it.
    machine_memory: int
    cpus: int | None

    @property
    def user_memory(self) -> int:
        total = self.memory or self.machine_memory
        return total - min(total // 8, _AGENTS_MEMORY)

    @property
    def all_pids(self) -> int:
        return self.pids + _AGENTS_PIDS


def folders(version: int, controllers: frozenset[str]) -> tuple[str, ...]:
    """The groups of a box below its own in one hierarchy, parents first."""
    if version == 2 or "cpu" in controllers:
        return ("agent", "user", "user/commands", "user/terminals")
    return ("user",) if controllers & LIMITING else ()


def settings(
    version: int, controllers: frozenset[str], limits: Limits, *, behind_gateway: bool = False
) -> Iterator[tuple[str, str]]:
    """(file below the box's group, what is written to it), in order. A file that begins with ``?`` may be missing.

    ``behind_gateway``: the box's group stands beside the gateway and other boxes alone.
    """
    if behind_gateway and "cpu" in controllers:
        yield _weight(version, "", _BEHIND_GATEWAY)
    if version == 2:
        yield from _version_2(controllers, limits)
    else:
        yield from _version_1(controllers, limits)


def _version_2(controllers: frozenset[str], limits: Limits) -> Iterator[tuple[str, str]]:
    yield "cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(controllers))
    if "memory" in controllers:
        if limits.memory is not None:
            yield "memory.max", str(limits.memory)
            # Not there without swap. With it, a sandbox would have more than it shows.
            yield "?memory.swap.max", "0"
        yield "user/memory.max", str(limits.user_memory)
    if "pids" in controllers:
        yield "pids.max", str(limits.all_pids)
        yield "user/pids.max", str(limits.pids)
    if "cpu" in controllers:
        yield "user/cgroup.subtree_control", "+cpu"
        if limits.cpus is not None:
            yield "cpu.max", f"{limits.cpus * _PERIOD_MICROSECONDS} {_PERIOD_MICROSECONDS}"
        for name, weight in _WEIGHTS.items():
            yield _weight(2, f"{name}/", weight)


def _version_1(controllers: frozenset[str], limits: Limits) -> Iterator[tuple[str, str]]:
    if "memory" in controllers:
        if limits.memory is not None:
            yield "memory.limit_in_bytes", str(limits.memory)
            yield "?memory.memsw.limit_in_bytes", str(limits.memory)
        yield "user/memory.limit_in_bytes", str(limits.user_memory)
    if "pids" in controllers:
        yield "pids.max", str(limits.all_pids)
        yield "user/pids.max", str(limits.pids)
    if "cpu" in controllers:
        if limits.cpus is not None:
            yield "cpu.cfs_period_us", str(_PERIOD_MICROSECONDS)
            yield "cpu.cfs_quota_us", str(limits.cpus * _PERIOD_MICROSECONDS)
        for name, weight in _WEIGHTS.items():
            yield _weight(1, f"{name}/", weight)


def _weight(version: int, folder: str, weight: int) -> tuple[str, str]:
    if version == 2:
        return f"{folder}cpu.weight", str(weight)
    return f"{folder}cpu.shares", str(round(weight * _SHARES_PER_WEIGHT))


def leaf(version: int, controllers: frozenset[str], wanted: str) -> Path:
    """Where processes of ``agent``, ``user/commands`` or ``user/terminals`` live, below the box's group."""
    known = folders(version, controllers)
    name = Path(wanted)
    while str(name) != "." and str(name) not in known:
        name = name.parent
    return name
