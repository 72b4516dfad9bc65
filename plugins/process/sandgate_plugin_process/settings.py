"""The ``[backends.process]`` table of the configuration, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sandgate_plugin_api import refused_settings

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

    #: ``auto``: what is possible here. ``on``: processes, memory and CPU, or no start. ``off``: nothing.
    limits: Literal["auto", "on", "off"] = "auto"
    #: CPUs of each sandbox; None: all that the gateway has.
    cpu_count: int | None = Field(default=None, ge=1, le=4096)
    #: MiB of each sandbox; None: all that the gateway has. An idle agent takes some thirty.
    memory_mb: int | None = Field(default=None, ge=64, le=2**30)
    #: Processes and threads that a sandbox's commands may have at a time.
    pids: int = Field(default=4096, ge=16, le=4_000_000)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.limits == "off" and (given := self.model_fields_set & {"cpu_count", "memory_mb", "pids"}):
            raise ValueError(f"'{min(given)}' is a limit, and limits are off")
        return self

    @classmethod
    def read(cls, table: Mapping[str, object]) -> ProcessSettings:
        """The settings of a table. Raises FailedPrecondition with one line that names every wrong key."""
        try:
            return cls.model_validate(dict(table))
        except ValidationError as error:
            raise refused_settings(error.errors(), keys=cls.model_fields) from None
