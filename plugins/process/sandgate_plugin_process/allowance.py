"""What each sandbox may use here: the operator's wish, and what the system lets the gateway keep.

Memory and CPU are limited by control groups or not at all: the rlimit for memory counts addresses, of which a JavaScript
engine reserves more than any machine has. Processes are limited by rlimit where there are no control groups, as far as the
kernel counts those of a sandbox apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sandgate_errors import FailedPrecondition, InvalidArgument
from sandgate_plugin_api import Resources
from sandgate_plugin_process.boxes import Record
from sandgate_plugin_process.grounds import NO_GROUND, BoxGroups, Ground
from sandgate_plugin_process.isolation import Isolation
from sandgate_plugin_process.limits import LIMITING, Limits
from sandgate_plugin_process.machine import machine
from sandgate_plugin_process.settings import ProcessSettings

__all__ = ["Allowance"]

_NAMES = {"pids": "processes", "memory": "memory", "cpu": "CPU"}
_MEND = (
    "the gateway needs control groups of its own: run it as root, or as a service with `Delegate=yes` "
    "(docs/backends/process.md, Limits)"
)


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """See the module; found once, when the backend opens."""

    ground: Ground
    #: What the gateway itself may use.
    machine: Resources
    #: What a sandbox has that asks for nothing else.
    resources: Resources
    pids: int
    #: The same where an rlimit has to keep it.
    processes_by_rlimit: int | None
    #: Limits are off by the operator's own choice.
    off: bool
    #: How far the rlimit goes.
    rlimit_reach: str

    @classmethod
    def find(cls, settings: ProcessSettings, isolation: Isolation, folder: Path) -> Allowance:
        """Blocks. Raises FailedPrecondition when the operator wants what cannot be kept here."""
        has = machine(folder)
        for name in ("cpu_count", "memory_mb"):
            if (wanted := getattr(settings, name)) is not None and wanted > getattr(has, name):
                raise FailedPrecondition(f"'{name}' is {wanted}, and the gateway has {getattr(has, name)}")
        off = settings.limits == "off"
        ground = NO_GROUND if off else Ground.find()
        reach = "" if off or "pids" in ground.limits else isolation.processes_by_rlimit()
        missing = _wanted(settings) - ground.limits - ({"pids"} if reach and settings.limits != "on" else set())
        if missing:
            raise FailedPrecondition(f"backend 'process' cannot limit {_listed(missing)}: {_MEND}")
        return cls(
            ground=ground,
            machine=has,
            resources=replace(
                has, cpu_count=settings.cpu_count or has.cpu_count, memory_mb=settings.memory_mb or has.memory_mb
            ),
            pids=settings.pids,
            processes_by_rlimit=settings.pids if reach else None,
            off=off,
            rlimit_reach=reach,
        )

    @property
    def limits_resources(self) -> bool:
        """Whether any CPU count and any memory can be kept."""
        return self.ground.limits >= {"cpu", "memory"}

    def admitted(self, wanted: Resources, *, kept: bool) -> Resources:
        """``wanted``, when it can be kept. ``kept``: it comes from a sandbox of the past, when the machine may have had more.

        Raises InvalidArgument, FailedPrecondition.
        """
        if not kept:
            for name, what in (("cpu_count", "CPUs"), ("memory_mb", "MiB of memory")):
                if getattr(wanted, name) > getattr(self.machine, name):
                    raise InvalidArgument(f"a sandbox can have {getattr(self.machine, name)} {what} here, and no more")
            if wanted.disk_size_mb != self.resources.disk_size_mb:
                raise InvalidArgument("backend 'process' cannot limit the disk of a sandbox")
        self._check(self._limits(wanted.cpu_count, wanted.memory_mb))
        return wanted

    def groups(self, record: Record) -> BoxGroups:
        """Make the groups of a box. Raises OSError, and FailedPrecondition when its limits cannot be kept any more."""
        limits = self._limits(record.cpu_count, record.memory_mb)
        self._check(limits)
        return self.ground.make(record.mark, limits)

    def describe(self) -> str:
        """For the operator."""
        if self.off:
            return "off: a sandbox can use all of the machine"
        kept = self.ground.limits
        told = [f"by control groups: {_listed(kept)}"] if kept else []
        if self.rlimit_reach:
            told.append(f"by rlimit: the processes, {self.rlimit_reach}")
        if missing := LIMITING - kept - ({"pids"} if self.rlimit_reach else set()):
            told.append(f"not: {_listed(missing)}; {_MEND}")
        return ", ".join(told)

    def _limits(self, cpu_count: int, memory_mb: int) -> Limits:
        return Limits(
            pids=self.pids,
            memory=memory_mb * 2**20 if 0 < memory_mb < self.machine.memory_mb else None,
            machine_memory=self.machine.memory_mb * 2**20,
            cpus=cpu_count if 0 < cpu_count < self.machine.cpu_count else None,
        )

    def _check(self, limits: Limits) -> None:
        needed = {name for name, limit in (("memory", limits.memory), ("cpu", limits.cpus)) if limit is not None}
        if not self.off and (missing := needed - self.ground.limits):
            raise FailedPrecondition(f"the limits of this sandbox cannot be kept here: {_listed(missing)}")


def _wanted(settings: ProcessSettings) -> frozenset[str]:
    if settings.limits == "on":
        return LIMITING
    keys = {"cpu_count": "cpu", "memory_mb": "memory", "pids": "pids"}
    return frozenset(keys[key] for key in settings.model_fields_set & keys.keys() if getattr(settings, key) is not None)


def _listed(names: frozenset[str] | set[str]) -> str:
    return ", ".join(text for name, text in _NAMES.items() if name in names)
