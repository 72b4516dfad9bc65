"""Configuration: the TOML file, then ``SANDGATE_*``, then flags; the later one wins, key by key.

:class:`Settings` is the only list of keys: the environment's names are made from it, ``docs/configuration.md`` is tested
against it, and whatever is not in it is refused by name, wherever it was written. Secrets come by the environment only,
since flags are visible to every user of the machine and configuration files end up in repositories.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from sandgate_errors import InvalidArgument

__all__ = ["ENV_ONLY", "PREFIX", "Configuration", "Settings", "default_state_dir", "load"]

PREFIX = "SANDGATE_"

#: Variables that are no keys of the file, and what each is for.
ENV_ONLY: Mapping[str, str] = {
    "SANDGATE_CONFIG": "the configuration file, as `--config`",
    "SANDGATE_ISOLATION": "as `--isolation`: sets `isolation` in `[backends.process]`",
    "SANDGATE_API_KEY": "the first API key: `e2b_` and 40 lower-case hexadecimal digits",
    # Of the same name for the client, so that one environment serves both ends.
    "SANDGATE_CORE": "read by the Python client only: the core's gRPC address",
    "SANDGATE_SEED": "the secret behind the sandboxes' access tokens: at least 32 hexadecimal digits",
    # Read by the project's own tests, which start gateways that inherit it.
    "SANDGATE_REQUIRE": "read by the tests only: what must not be skipped",
}

# Key shape that the older SDKs insist on before they send anything.
_API_KEY = re.compile(r"e2b_[0-9a-f]{40}")
_SEED = re.compile(r"(?:[0-9a-fA-F]{2}){16,}")

_BACKEND_OF_ISOLATION = "process"


def default_state_dir() -> Path:
    """Where a gateway keeps its state when nobody says otherwise."""
    if os.geteuid() == 0:
        return Path("/var/lib/sandgate")
    base = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification says that a relative path there counts as unset.
    if base.startswith("/"):
        return Path(base) / "sandgate"
    try:
        return Path("~/.local/state/sandgate").expanduser()
    except RuntimeError:
        # As in a container that runs under a number without an account.
        raise InvalidArgument("this user has no home directory: name a state directory with --state-dir") from None


def _no_bool(value: object) -> object:
    # pydantic takes true for 1; `port = true` is a mistake.
    if isinstance(value, bool):
        raise ValueError("should be a number")  # noqa: TRY004 - pydantic makes its own error of a ValueError only
    return value


def _comma_list(value: object) -> object:
    # The environment has no lists.
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _grpc_target(text: str) -> str:
    """An address of the core; a port alone is one of this machine, since nothing there is encrypted."""
    if text.startswith("unix:/"):
        return text
    host, _, port = text.rpartition(":")
    if not re.fullmatch(r"\d{1,5}", port, re.ASCII) or int(port) > 65535 or (not host and ":" in text):
        raise ValueError(f"'{text}' is none of port, host:port and unix:/path")
    return f"{host or '127.0.0.1'}:{port}"


def _plugin_tables(value: object) -> object:
    # Most plugins take no settings: their names are enough, and the environment has nothing but names.
    value = _comma_list(value)
    return {name: {} for name in value} if isinstance(value, list | tuple) else value


Number = Annotated[int, BeforeValidator(_no_bool)]


class Settings(BaseModel):
    """Every key of the configuration file. Each has a variable ``SANDGATE_<KEY>`` too, but for ``backends``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: Number = Field(8700, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    state_dir: Path = Field(
        default_factory=default_state_dir, description="folder of the store, the secrets and the sandboxes"
    )
    database: str | None = Field(None, min_length=1, description="URL of the store; none: SQLite in the state folder")
    backend: str = Field("process", min_length=1, description="backend that makes the sandboxes")
    backends: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="one table for each backend, as its own page describes it"
    )
    plugins: Annotated[dict[str, dict[str, Any]], BeforeValidator(_plugin_tables)] = Field(
        default_factory=dict,
        description="plugins whose policy holds: their names, or one table for each, in this order",
    )
    profile: str | None = Field(
        None, min_length=1, description="a plugin that makes the whole gateway behave in another way"
    )
    workers: Number = Field(1, ge=1, le=64, description="processes that speak HTTP")
    on_exit: Literal["keep", "kill"] = Field("keep", description="what becomes of the sandboxes when the gateway stops")
    domain: str | None = Field(None, description="domain below which ports of sandboxes are reached")
    trusted_proxies: Annotated[tuple[str, ...], BeforeValidator(_comma_list)] = Field(
        (),
        description="addresses or networks of proxies in front, whose `X-Forwarded-For` and `-Proto` are passed on to ports",
    )
    grpc_listen: Annotated[tuple[str, ...], BeforeValidator(_comma_list)] = Field(
        (),
        description="more gRPC addresses of the core, `port`, `host:port` or `unix:/path`, besides its own socket",
    )
    core_address: str | None = Field(
        None,
        description="where other gateways on the same database reach this one's core, `port`, `host:port` or `unix:/path`",
    )
    core_lease: Number = Field(
        15,
        ge=2,
        le=3600,
        description="seconds without a sign of life after which a core is taken for dead by the others",
    )
    max_timeout: Number = Field(
        86_400, ge=1, le=100 * 365 * 86_400, description="longest life of a sandbox, in seconds"
    )
    create_timeout: Number = Field(
        60, ge=1, le=3600, description="longest time that making a sandbox may take, in seconds"
    )
    max_rpc_bytes: Number = Field(
        64 * 1024 * 1024, ge=64 * 1024, le=1024 * 1024 * 1024, description="largest RPC message, in bytes"
    )
    max_rpc_request_bytes: Number | None = Field(
        None, ge=64 * 1024, le=1024 * 1024 * 1024, description="largest RPC message from a client; none: the same"
    )
    max_upload_bytes: Number = Field(0, ge=0, description="largest body of an upload, in bytes; 0: no limit")
    max_upload_files: Number = Field(0, ge=0, description="most files in one upload; 0: no limit")
    max_list_depth: Number = Field(0, ge=0, description="greatest depth of a directory listing; 0: no limit")
    max_list_entries: Number = Field(0, ge=0, description="most entries of a directory listing; 0: no limit")
    envd_version: str = Field(
        "0.6.13",
        pattern=r"^(0\.[1-9][0-9]*|[1-9][0-9]*\.(0|[1-9][0-9]*))\.(0|[1-9][0-9]*)$",
        description="what sandboxes say they run, 0.1.0 or later; SDKs choose features by it",
    )
    metrics_listen: str | None = Field(
        None, description="where the core shows metrics for Prometheus, `port` or `host:port`"
    )
    log_commands: Literal["none", "tagged", "all"] = Field(
        "none", description="of which commands the output is kept in the logs of their sandbox"
    )
    traces: Literal["none", "otlp"] = Field(
        "none", description="where traces go: `none`, or `otlp` to a collector that the variables `OTEL_*` name"
    )
    audit_days: Number = Field(30, ge=1, le=3650, description="how long entries of the audit are kept, in days")
    log_format: Literal["auto", "text", "json"] = Field(
        "auto", description="form of the log; `auto` is text on a terminal, else JSON"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")

    @field_validator("state_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        # Children do not share the working directory's meaning; ".." and links stay for the kernel to follow.
        if "\0" in str(value):
            raise ValueError("contains a NUL character")
        try:
            return value.expanduser().absolute()
        except RuntimeError as error:
            raise ValueError(f"no such home directory: {value}") from error

    @field_validator("core_address")
    @classmethod
    def _core_target(cls, value: str | None) -> str | None:
        return None if value is None else _grpc_target(value)

    @model_validator(mode="after")
    def _profile_first(self) -> Self:
        # A profile is a plugin like any other, asked before those that build on it.
        if self.profile is not None and next(iter(self.plugins), None) != self.profile:
            table = self.plugins.get(self.profile, {})
            object.__setattr__(self, "plugins", {self.profile: table, **self.plugins})
        return self

    @field_validator("grpc_listen")
    @classmethod
    def _grpc_targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_grpc_target, value))

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(ipaddress.ip_network(network)) for network in value)

    @field_validator("metrics_listen")
    @classmethod
    def _metrics_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        address = _grpc_target(value)
        if address.startswith("unix:") or address.endswith(":0"):
            raise ValueError(f"'{value}' is neither port nor host:port")
        return address

    @field_validator("domain")
    @classmethod
    def _plain_domain(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?", value):
            raise ValueError("should be a lower-case domain name, with a port if need be")
        return value


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """The settings, and the secrets that the environment gave."""

    settings: Settings
    api_key: str | None = field(default=None, repr=False)
    seed: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Values from one source, and how a key is called there."""

    values: Mapping[str, object]
    called: Mapping[str, str]


def load(
    flags: Mapping[str, object],
    *,
    environment: Mapping[str, str] | None = None,
    config: Path | None = None,
    defaults: Callable[[Iterable[str]], Mapping[str, object]] | None = None,
) -> Configuration:
    """The configuration of one command. ``flags`` holds those that were given, by key; None counts as not given.

    ``defaults``: what the plugins of these names want where nobody says otherwise; for commands that need to know.
    Raises InvalidArgument with one line that names the place of the mistake.
    """
    env = _set_variables(os.environ if environment is None else environment)
    path = config or (Path(env["SANDGATE_CONFIG"]) if "SANDGATE_CONFIG" in env else None)
    given = {key: value for key, value in flags.items() if value is not None}
    isolation = _isolation(given, env)
    layers = [
        _file_layer(path) if path is not None else _Layer(values={}, called={}),
        _environment_layer(env),
        _Layer(values=given, called={key: _flag(key) for key in given}),
    ]
    settings = _validate(layers)
    if defaults is not None and settings.plugins:
        wanted = defaults(settings.plugins)
        lowest = _Layer(values=wanted, called={key: f"a plugin's default for '{key}'" for key in wanted})
        settings = _validate([lowest, *layers])
    if isolation is not None:
        settings = _with_isolation(settings, *isolation)
    return Configuration(
        settings=settings,
        api_key=_secret(env, "SANDGATE_API_KEY", _API_KEY),
        seed=_secret(env, "SANDGATE_SEED", _SEED),
    )


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _set_variables(environment: Mapping[str, str]) -> dict[str, str]:
    # An empty variable is how shells and compose files say "not set".
    return {name: value for name, value in environment.items() if name.startswith(PREFIX) and value}


def _file_layer(path: Path) -> _Layer:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"configuration file {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"configuration file {path}: not valid TOML: {error}") from error
    for key in table:
        if key == "isolation":
            raise InvalidArgument(f"{path}: 'isolation' belongs into the table [backends.{_BACKEND_OF_ISOLATION}]")
        if key not in Settings.model_fields:
            raise InvalidArgument(f"{path}: unknown key '{key}'{_nearest(key, Settings.model_fields)}")
    if isinstance(folder := table.get("state_dir"), str) and not folder.startswith("~"):
        # A file means the same from wherever it is read.
        table["state_dir"] = path.absolute().parent / folder
    return _Layer(values=table, called={key: f"{path}: {key}" for key in table})


def _environment_layer(env: Mapping[str, str]) -> _Layer:
    keys = {PREFIX + key.upper(): key for key in Settings.model_fields if key != "backends"}
    for name in env:
        if name not in keys and name not in ENV_ONLY:
            raise InvalidArgument(f"unknown variable {name}{_nearest(name, [*keys, *ENV_ONLY])}")
    used = {key: name for name, key in keys.items() if name in env}
    return _Layer(values={key: env[name] for key, name in used.items()}, called=used)


def _nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def _validate(layers: Iterable[_Layer]) -> Settings:
    values: dict[str, object] = {}
    called: dict[str, str] = {}
    for layer in layers:
        values.update(layer.values)
        called.update(layer.called)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise InvalidArgument("; ".join(_sentence(item, called) for item in error.errors())) from None


def _sentence(item: ErrorDetails, called: Mapping[str, str]) -> str:
    key, *rest = [str(part) for part in item["loc"]]
    place = ".".join([called.get(key, key), *rest])
    text = item["msg"].removeprefix("Value error, ")
    return f"{place}: {text[0].lower()}{text[1:]}"


def _isolation(flags: dict[str, object], env: Mapping[str, str]) -> tuple[str, str] | None:
    """The isolation asked for outside the file, and by what; takes it out of ``flags``."""
    if (value := flags.pop("isolation", None)) is not None:
        return str(value), "--isolation"
    return (env["SANDGATE_ISOLATION"], "SANDGATE_ISOLATION") if "SANDGATE_ISOLATION" in env else None


def _with_isolation(settings: Settings, value: str, asked_by: str) -> Settings:
    name = _BACKEND_OF_ISOLATION
    if settings.backend != name and name not in settings.backends:
        raise InvalidArgument(f"{asked_by} is about the backend '{name}', which this gateway does not use")
    table = {**settings.backends.get(name, {}), "isolation": value}
    return settings.model_copy(update={"backends": {**settings.backends, name: table}})


def _secret(env: Mapping[str, str], name: str, shape: re.Pattern[str]) -> str | None:
    value = env.get(name)
    if value is not None and not shape.fullmatch(value):
        # The value stays out of the text: it may be a real secret with a slip in it.
        raise InvalidArgument(f"{name} should be {ENV_ONLY[name].partition(': ')[2]}")
    return value
