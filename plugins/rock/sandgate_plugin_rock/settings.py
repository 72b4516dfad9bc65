"""The table ``[plugins.rock]``, checked. Every key has a default: the profile alone is a whole ROCK service."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from sandgate_errors import FailedPrecondition

__all__ = ["MOST_COMMANDS", "RockSettings"]

#: Commands that one edge has at a time (K25).
MOST_COMMANDS = 1024


@dataclass(frozen=True, kw_only=True)
class RockSettings:
    """What an operator may choose."""

    #: A file with keys of clients that are not of E2B's form; see :mod:`sandgate_plugin_rock.keys`. None: there are none.
    keys_file: Path | None = None
    #: What becomes of a sandbox at its deadline: it is gone, or it stops and keeps its files (K10).
    at_deadline: Literal["kill", "stop"] = "kill"
    #: Where a sandbox is that has no address of its own (K14): on the gateway's machine.
    address: str = "127.0.0.1"
    #: Commands that one edge has at a time (K25).
    max_commands: int = MOST_COMMANDS

    @classmethod
    def read(cls, table: Mapping[str, object]) -> RockSettings:
        """Raises FailedPrecondition with one line for the operator."""
        if unknown := sorted(table.keys() - {field.name for field in fields(cls)}):
            raise FailedPrecondition(f"there is no setting '{unknown[0]}'")
        keys_file = table.get("keys_file")
        if keys_file is not None and (not isinstance(keys_file, str) or not Path(keys_file).is_absolute()):
            raise FailedPrecondition("keys_file must be an absolute path")
        at_deadline = table.get("at_deadline", cls.at_deadline)
        if at_deadline not in ("kill", "stop"):
            raise FailedPrecondition("at_deadline must be 'kill' or 'stop'")
        most = table.get("max_commands", cls.max_commands)
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise FailedPrecondition("max_commands must be a number from 1 up")
        return cls(
            keys_file=None if keys_file is None else Path(keys_file),
            at_deadline="stop" if at_deadline == "stop" else "kill",
            address=_address(table.get("address", cls.address)),
            max_commands=most,
        )


def _address(text: object) -> str:
    try:
        return str(ipaddress.ip_address(str(text)))
    except ValueError:
        raise FailedPrecondition("address must be an IP address") from None
