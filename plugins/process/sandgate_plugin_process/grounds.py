"""The control groups that limit boxes: found out once which can be made here, then made for each box.

What may be done is tried and not guessed: groups are made, a process is moved into them, and they are removed again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sandgate_plugin_process.freezing import possible_groups, remove_group
from sandgate_plugin_process.hierarchies import Hierarchy, hierarchies, settle
from sandgate_plugin_process.limits import LIMITING, USEFUL, Limits, folders, leaf, settings

__all__ = ["NO_GROUND", "BoxGroups", "Ground", "remove_groups", "shown"]

_log = logging.getLogger(__name__)

#: How the groups of boxes begin.
_PREFIX = "sandgate-"
#: An empty group that is younger may be of a box that another gateway is about to start.
_LEFT_BEHIND_SECONDS = 60.0
#: What programs look at. The rest would be one more mount for nothing.
_SHOWN = ("memory", "cpu", "cpuacct")
_SEEN_AT = "/sys/fs/cgroup"
_TRIAL = Limits(pids=4096, memory=2**30, machine_memory=2**30, cpus=1)


@dataclass(frozen=True)
class BoxGroups:
    """The groups of one box; all of them exist."""

    #: The one that also freezes the box, of version 2; its processes live in groups below.
    freezer: Path | None = None
    #: What its first process joins.
    first: tuple[Path, ...] = ()
    #: What everything joins from which commands are started.
    commands: tuple[Path, ...] = ()
    #: What a terminal joins on top.
    terminals: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Ground:
    """Where groups of boxes limit something; empty where the gateway may not make any."""

    hierarchies: tuple[Hierarchy, ...] = ()

    @classmethod
    def find(cls) -> Ground:
        """Try what can be done here. Blocks for some milliseconds; may move the gateway into a leaf of its own group."""
        usable = []
        for hierarchy in hierarchies():
            hierarchy = _useful(hierarchy)
            if hierarchy.controllers and _works(hierarchy):
                usable.append(hierarchy)
        return cls(tuple(usable))

    @property
    def limits(self) -> frozenset[str]:
        """What can be limited: ``memory``, ``pids``, ``cpu``."""
        return LIMITING.intersection(name for hierarchy in self.hierarchies for name in hierarchy.controllers)

    @property
    def counts(self) -> bool:
        """Whether the groups of a box tell what it uses: its memory, and the time of CPUs."""
        names = {name for hierarchy in self.hierarchies for name in hierarchy.controllers}
        second = any(hierarchy.version == 2 and "cpu" in hierarchy.controllers for hierarchy in self.hierarchies)
        return "memory" in names and (second or "cpuacct" in names)

    def boxes(self, name: str) -> Mapping[str, str]:
        """Controller to where the group of the box of this name is or would be."""
        return {
            controller: str(hierarchy.place / name)
            for hierarchy in self.hierarchies
            for controller in sorted(hierarchy.controllers)
        }

    def make(self, name: str, limits: Limits) -> BoxGroups:
        """The groups of a new box. Raises OSError; none is left then."""
        try:
            for hierarchy in self.hierarchies:
                _make(hierarchy, name, limits)
        except BaseException:
            remove_groups(self.boxes(name))
            raise
        first, commands, terminals = (self._leaves(name, who) for who in ("agent", "user/commands", "user/terminals"))
        return BoxGroups(
            freezer=next((hierarchy.place / name for hierarchy in self.hierarchies if hierarchy.version == 2), None),
            first=first,
            # Where there is no group of their own they stay where they are.
            commands=tuple(group for group in commands if group not in first),
            terminals=tuple(group for group in terminals if group not in commands),
        )

    def _leaves(self, name: str, wanted: str) -> tuple[Path, ...]:
        return tuple(
            hierarchy.place / name / leaf(hierarchy.version, hierarchy.controllers, wanted)
            for hierarchy in self.hierarchies
        )

    def sweep(self, known: Iterable[str]) -> None:
        """Remove groups that boxes of the past have left: empty ones, whose names nobody knows any more."""
        names = frozenset(known)
        places = {hierarchy.place for hierarchy in self.hierarchies}
        for place in places | {group.path.parent for group in possible_groups(_PREFIX)}:
            for group in _empty_groups(place):
                if group.name not in names:
                    remove_group(group)


def remove_groups(groups: Mapping[str, str]) -> None:
    """Remove what :meth:`Ground.boxes` has named; its processes have ended."""
    for path in set(groups.values()):
        remove_group(Path(path))


def shown(groups: Mapping[str, str]) -> Mapping[str, tuple[str, str]]:
    """Controller to (the box's group, where a sandbox sees it): where programs look for their limits in a container."""
    seen = {name: path for name, path in groups.items() if name in _SHOWN}
    second = {name for name, path in seen.items() if (Path(path).parent / "cgroup.controllers").exists()}
    root = _SEEN_AT if second == seen.keys() else f"{_SEEN_AT}/unified"
    return {name: (path, root if name in second else f"{_SEEN_AT}/{name}") for name, path in seen.items()}


def _useful(hierarchy: Hierarchy) -> Hierarchy:
    """The same with those of its controllers that boxes get and that matter here."""
    if hierarchy.version == 2:
        return settle(hierarchy, LIMITING)
    return replace(hierarchy, controllers=hierarchy.controllers & USEFUL)


def _works(hierarchy: Hierarchy) -> bool:
    """Whether a process can be put into a box's groups there."""
    trial = Ground((hierarchy,))
    name = f"{_PREFIX}trial-{secrets.token_hex(8)}"
    try:
        groups = trial.make(name, _TRIAL)
    except OSError as error:
        _log.info("no control groups for sandboxes below %s: %s", hierarchy.place, error)
        return False
    try:
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
            try:
                for group in (*groups.first, *groups.commands, *groups.terminals):
                    (group / "cgroup.procs").write_text(str(child.pid))
            finally:
                child.kill()
    except OSError as error:
        _log.info("no process can be moved into control groups below %s: %s", hierarchy.place, error)
        return False
    finally:
        remove_groups(trial.boxes(name))
    return True


def _make(hierarchy: Hierarchy, name: str, limits: Limits) -> None:
    box = hierarchy.place / name
    # The box's own may be there already: of version 2 it is also what freezes the box.
    box.mkdir(exist_ok=True)
    for below in folders(hierarchy.version, hierarchy.controllers):
        (box / below).mkdir()
    behind = not hierarchy.is_everybodys
    for file, value in settings(hierarchy.version, hierarchy.controllers, limits, behind_gateway=behind):
        try:
            _write(box / file.removeprefix("?"), value)
        except FileNotFoundError:
            if not file.startswith("?"):
                raise


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _empty_groups(place: Path) -> Iterator[Path]:
    try:
        names = [name for name in os.listdir(place) if name.startswith(_PREFIX)]
    except OSError:
        return
    for name in names:
        # Other gateways make and remove theirs meanwhile.
        with contextlib.suppress(OSError):
            if not _is_populated(place / name) and time.time() - os.stat(place / name).st_ctime > _LEFT_BEHIND_SECONDS:
                yield place / name


def _is_populated(group: Path) -> bool:
    return any(Path(folder, "cgroup.procs").read_text("ascii").strip() for folder, _, _ in os.walk(group))


NO_GROUND = Ground()
