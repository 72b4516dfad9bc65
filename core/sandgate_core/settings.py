"""The settings line of the core: what the front writes to its standard input (docs/architecture.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from sandgate_errors import InvalidArgument

__all__ = ["Settings"]

_SHORTEST_SEED = 16


class Settings(BaseModel):
    """One deployment. An unknown field is an error, so a misspelt one is not silently without effect."""

    # Values are left out of error texts: they may be secrets.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    #: What must survive: the database, the backends' own folders.
    state_dir: Path
    #: Sockets.
    runtime_dir: Path
    #: None: SQLite in the state directory.
    database: str | None = Field(default=None, repr=False)
    #: Where other cores of the database and their edges reach this one: a gRPC target. None: the first of ``listen``.
    address: str | None = Field(default=None, min_length=1)
    #: Seconds without a sign of life after which the other cores take this one for dead.
    lease: float = Field(default=15, ge=1, le=3600, allow_inf_nan=False)
    #: gRPC targets. None: a unix socket in the runtime directory.
    listen: list[str] | None = Field(default=None, min_length=1)
    default_backend: str
    #: The table of each policy plugin, in the order in which their hooks are asked.
    plugins: dict[str, dict[str, object]] = Field(default_factory=dict)
    #: The table of each configured backend; the default one counts as configured.
    backends: dict[str, dict[str, object]] = Field(default_factory=dict)
    internal_token: SecretStr = Field(min_length=16)
    #: Hexadecimal; the root of all data-plane tokens.
    seed: SecretStr
    first_key: SecretStr | None = None
    #: Whether the operator named ``first_key``. Otherwise it is a candidate, for a store without any key.
    first_key_given: bool = False
    on_exit: Literal["keep", "kill"] = "keep"
    #: What SDKs read their features from. Below 0.1.0 they refuse every sandbox.
    envd_version: str = Field(pattern=r"^(0\.[1-9][0-9]*|[1-9][0-9]*\.(0|[1-9][0-9]*))\.(0|[1-9][0-9]*)$")
    #: Seconds; the longest life of a sandbox.
    max_timeout: float = Field(default=24 * 3600, ge=1, le=100 * 365 * 24 * 3600, allow_inf_nan=False)
    #: Seconds a backend has to make a sandbox.
    create_timeout: float = Field(default=60, gt=0, le=3600, allow_inf_nan=False)
    #: ``host:port`` for Prometheus; None: nowhere.
    metrics_listen: str | None = Field(default=None, pattern=r"^\S+:[0-9]{1,5}$")
    #: How long entries of the audit are kept.
    audit_days: int = Field(default=30, ge=1, le=3650)
    #: Of which commands the lines that they write are kept.
    log_commands: Literal["none", "tagged", "all"] = "none"
    #: Where spans of calls go; see ``sandgate_tracing``.
    traces: Literal["none", "otlp"] = "none"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("seed")
    @classmethod
    def _check_seed(cls, seed: SecretStr) -> SecretStr:
        try:
            raw = bytes.fromhex(seed.get_secret_value())
        except ValueError:
            raise ValueError("must be hexadecimal") from None
        if len(raw) < _SHORTEST_SEED:
            raise ValueError(f"must have at least {_SHORTEST_SEED} bytes")
        return seed

    @property
    def seed_bytes(self) -> bytes:
        return bytes.fromhex(self.seed.get_secret_value())

    @property
    def targets(self) -> list[str]:
        return self.listen or [f"unix:{self.runtime_dir / 'core.sock'}"]

    @property
    def backend_tables(self) -> dict[str, dict[str, object]]:
        return {self.default_backend: {}, **self.backends}

    @classmethod
    def parse(cls, line: bytes | str) -> Settings:
        """The settings in one line of JSON. Raises InvalidArgument with one line that names the fields."""
        try:
            return cls.model_validate_json(line)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or 'line'}: {fault['msg']}"
                for fault in error.errors(include_url=False, include_context=False, include_input=False)
            )
            raise InvalidArgument(f"the core's settings are not valid: {faults}") from None
