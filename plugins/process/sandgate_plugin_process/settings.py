"""The ``[backends.process]`` table of the configuration, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandgate_errors import FailedPrecondition

__all__ = ["ProcessSettings"]


class ProcessSettings(BaseModel):
    """What an operator may choose; an unknown key is an error that names it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    #: ``none`` separates nothing: for machines without bubblewrap, and for trusted code only.
    isolation: Literal["bubblewrap", "none"] = "bubblewrap"
    #: The bubblewrap program; None: the first ``bwrap`` on PATH.
    bwrap: str | None = Field(default=None, min_length=1)
    #: Sandboxes made ahead, so that a create need not wait for one. Each costs the memory of an idle sandbox.
    warm: int = Field(default=2, ge=0, le=64)

    @classmethod
    def read(cls, table: Mapping[str, object]) -> ProcessSettings:
        """The settings of a table. Raises FailedPrecondition with one line that names every wrong key."""
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            faults = "; ".join(
                f"'{'.'.join(map(str, fault['loc']))}': {fault['msg'].lower()}" for fault in error.errors()
            )
            raise FailedPrecondition(f"settings of backend 'process': {faults}") from None
