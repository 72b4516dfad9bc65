"""Making all of a box stand still and go on, and ending it: what :mod:`freezing` does to processes, with the box's record.

All blocks. The record is written before anything is stopped, so that after a crash it says what has to be let go on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from sandgate_errors import NotFound, Unavailable
from sandgate_plugin_process.boxes import Box, Record
from sandgate_plugin_process.freezing import Group, go_on, possible_groups, stop_all, stopped_by_themselves
from sandgate_plugin_process.grounds import remove_groups
from sandgate_plugin_process.isolation import Isolation
from sandgate_plugin_process.pids import ProcessId, boot_id

__all__ = ["Standstill", "group_for", "record_of"]

_log = logging.getLogger(__name__)


class Standstill:
    """Stops and ends the boxes of one gateway."""

    def __init__(self, isolations: Mapping[str, Isolation]) -> None:
        self._isolations = isolations

    def going_on(self, box: Box) -> Record:
        """The record of a box that does not stand still for a copy that nobody makes any more."""
        record = record_of(box)
        if record.paused == "copy":
            self.let_go_on(box, record)
            record = record_of(box)
        return record

    def freeze(self, box: Box, record: Record, *, kept: Literal["memory", "copy"] = "memory") -> None:
        """The record first, each time: after a crash half way it says what has to be let go on."""

        def members() -> list[ProcessId]:
            return self._isolations[record.isolation].members(record)

        if record.paused != kept:
            group = _group_of(record) if record.grouped else group_for(record, members())
            stopped = stopped_by_themselves(members) if group is None else frozenset[ProcessId]()
            place = None if group is None else str(group.path)
            record = replace(record, paused=kept, group=place, stopped=stopped)
            box.write(record)
        group = _group_of(record)
        try:
            stop_all(list if record.grouped else members, group, but=record.stopped)
        except BaseException as error:
            self.let_go_on(box, record)
            if isinstance(error, OSError):
                raise Unavailable("the sandbox cannot be stopped at the moment") from error
            raise
        if group is not None and not record.grouped:
            box.write(replace(record, grouped=True))

    def let_go_on(self, box: Box, record: Record) -> None:
        go_on(lambda: self._isolations[record.isolation].members(record), _group_of(record), but=record.stopped)
        box.write(replace(record, paused="", stopped=frozenset()))

    def end(self, record: Record) -> None:
        """End every process of a box, stopped ones too."""
        if record.boot_id != boot_id():
            return
        group = _group_of(record)
        # Without one there may still be an empty one, made just before the record could say so.
        groups = list(possible_groups(record.mark)) if group is None else [group]
        for group in groups:
            group.kill()
        self._isolations[record.isolation].end(record)
        for group in groups:
            group.remove()
        remove_groups(record.groups)


def record_of(box: Box) -> Record:
    record = box.read()
    if record is None:
        raise NotFound("what was known of the sandbox is lost")
    return record


def _group_of(record: Record) -> Group | None:
    return None if record.group is None else Group(Path(record.group))


def group_for(record: Record, members: Sequence[ProcessId] = ()) -> Group | None:
    """A new control group for a box, into which its processes can be moved; None where the gateway may make none."""
    for group in possible_groups(record.mark):
        try:
            group.make()
            # Making a group is no proof that processes may be moved into it.
            for process in members[:1]:
                group.add(process)
        except OSError as error:
            _log.info("a sandbox cannot be frozen by the control group %s: %s", group.path, error)
            group.remove()
        else:
            return group
    return None
