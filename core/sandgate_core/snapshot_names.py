"""Names of snapshots: ``name``, ``name:tag``, ``team/name`` and ``team/name:tag`` (rest.md 1.6, C52).

A missing tag is ``default`` where one snapshot is meant, and any tag where a list is filtered. The team is the caller's own:
it may be written, as E2B's clients do, and another team's names do not exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["DEFAULT_TAG", "SnapshotName", "parse_name"]

DEFAULT_TAG = "default"
_WRITTEN = re.compile(
    r"(?:(?P<team>[A-Za-z0-9._@-]{1,64})/)?(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,127})(?::(?P<tag>[A-Za-z0-9._-]{1,128}))?",
    re.ASCII,
)


@dataclass(frozen=True, kw_only=True)
class SnapshotName:
    """What was written; None where it was not."""

    team: str | None
    name: str
    tag: str | None

    def owner_for(self, caller: str | None) -> str | None:
        """Whose snapshots are meant: the caller's, or for one who sees all those of the team that is named.

        None: anybody's. Raises LookupError for another team's.
        """
        if caller is None or self.team is None:
            return caller if self.team is None else self.team
        if self.team != caller:
            raise LookupError(self.team)
        return caller


def parse_name(written: str) -> SnapshotName | None:
    """None for what can be no name of a snapshot."""
    found = _WRITTEN.fullmatch(written)
    return None if found is None else SnapshotName(team=found["team"], name=found["name"], tag=found["tag"])
