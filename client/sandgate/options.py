"""Options that several commands of the command line have, and the configuration that follows from them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from sandgate.config import Configuration

__all__ = ["Command", "as_json_option", "configuration", "name_values", "of_gateway", "of_serve"]

#: What an option is put on.
Command = Callable[..., None]


def _which_gateway(command: Command) -> Command:
    """Options that say which gateway a command is about."""
    command = click.option("--config", type=click.Path(path_type=Path), help="Configuration file (TOML).")(command)
    return click.option("--state-dir", metavar="DIR", help="State directory of the gateway.")(command)


def as_json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def of_serve(command: Command) -> Command:
    """Options that override the configuration; without a value of their own, so that the lower layers show through."""
    for option in reversed(
        [
            click.option("--host", help="Address to listen on (127.0.0.1)."),
            click.option("--port", type=int, help="Port to listen on (8700); 0 takes a free one."),
            click.option("--backend", help="Backend that makes the sandboxes (process)."),
            click.option(
                "--profile", metavar="NAME", help="Plugin that makes the gateway behave in another way (none)."
            ),
            click.option("--isolation", metavar="LEVEL", help="Isolation of the process backend: bubblewrap, none."),
            click.option("--workers", type=int, help="Processes that speak HTTP (1)."),
            click.option("--on-exit", type=click.Choice(["keep", "kill"]), help="What becomes of sandboxes (keep)."),
            click.option("--database", metavar="URL", help="Store; SQLite in the state directory otherwise."),
            click.option("--metrics-listen", metavar="ADDRESS", help="Port or host:port for Prometheus (none)."),
            click.option("--traces", type=click.Choice(["none", "otlp"]), help="Where traces go (none)."),
            click.option("--domain", help="Domain below which ports of sandboxes are reached."),
            click.option("--grpc-listen", metavar="ADDRESS", help="More gRPC addresses of the core, no TLS (none)."),
            click.option(
                "--core-address", metavar="ADDRESS", help="Where other gateways' cores reach this one's (none)."
            ),
            click.option("--core-lease", metavar="SECONDS", help="Silence that other cores take for death (15)."),
            click.option("--log-format", type=click.Choice(["auto", "text", "json"]), help="Form of the log (auto)."),
            click.option(
                "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Least level (info)."
            ),
        ]
    ):
        command = option(command)
    return _which_gateway(command)


def configuration(config: Path | None, *, as_served: bool = False, **flags: object) -> Configuration:
    """``as_served``: with what the gateway's plugins want where nobody says otherwise, for which they are loaded."""
    from sandgate.config import load

    if not as_served:
        return load(flags, config=config)
    from sandgate.plugins import defaults_of

    return load(flags, config=config, defaults=defaults_of)


def of_gateway(command: Command) -> Command:
    """Options that say which running gateway a command is about. It gets its state directory as ``folder``."""

    @functools.wraps(command)
    def located(config: Path | None, state_dir: str | None, **arguments: object) -> None:
        command(folder=configuration(config, state_dir=state_dir).settings.state_dir, **arguments)

    return _which_gateway(located)


def name_values(_context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """``NAME=VALUE`` options as a table; the last of one name wins."""
    pairs: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"'{text}' is not NAME=VALUE", param=parameter)
        pairs[name] = value
    return pairs
