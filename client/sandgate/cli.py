"""The command line: the program ``sandgate``.

Only names, options and help stand here; each command imports what it does when it is called, so that ``--help`` and
``--version`` answer at once. Every error becomes one line on standard error: exit status 2 for a mistake in how the
command was called or configured, 1 for everything else. A traceback is never shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from sandgate_errors import InvalidArgument, SandgateError

if TYPE_CHECKING:
    from sandgate.config import Configuration

__all__ = ["cli", "main"]

_OPERATIONAL = 1
_USAGE = 2
_INTERRUPTED = 130

_Command = TypeVar("_Command", bound=Callable[..., None])


def main() -> None:
    """Run the command line and leave with its exit status."""
    try:
        status = cli.main(prog_name="sandgate", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(_USAGE)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except InvalidArgument as error:
        _fail(error.message, _USAGE)
    except SandgateError as error:
        _fail(error.message, _OPERATIONAL)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(_INTERRUPTED)
    except Exception as error:
        _fail(_unexpected(error), _OPERATIONAL)
    else:
        sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int) -> None:
    # Parts of a message may come from a file or from a client.
    text = "".join(character if character.isprintable() else " " for character in message)
    click.echo(f"sandgate: {' '.join(text.split())}", err=True)
    sys.exit(status)


def _unexpected(error: Exception) -> str:
    """A fault of ours, in one line that is worth reporting."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f" at {Path(place.tb_frame.f_code.co_filename).name}:{place.tb_lineno}" if place is not None else ""
    return f"unexpected {type(error).__name__}{where}: {error}; please report this"


def _version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"sandgate {version('sandgate')}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version.")
def cli() -> None:
    """A self-hosted gateway for the E2B sandbox SDKs."""


def _of_gateway(command: _Command) -> _Command:
    """Options that say which gateway a command is about."""
    command = click.option("--config", type=click.Path(path_type=Path), help="Configuration file (TOML).")(command)
    return click.option("--state-dir", metavar="DIR", help="State directory of the gateway.")(command)


def _as_json(command: _Command) -> _Command:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def _of_serve(command: _Command) -> _Command:
    """Options that override the configuration; without a value of their own, so that the lower layers show through."""
    for option in reversed(
        [
            click.option("--host", help="Address to listen on (127.0.0.1)."),
            click.option("--port", type=int, help="Port to listen on (8700); 0 takes a free one."),
            click.option("--backend", help="Backend that makes the sandboxes (process)."),
            click.option("--isolation", metavar="LEVEL", help="Isolation of the process backend: bubblewrap, none."),
            click.option("--workers", type=int, help="Processes that speak HTTP (1)."),
            click.option("--on-exit", type=click.Choice(["keep", "kill"]), help="What becomes of sandboxes (keep)."),
            click.option("--database", metavar="URL", help="Store; SQLite in the state directory otherwise."),
            click.option("--domain", help="Domain below which ports of sandboxes are reached."),
            click.option("--log-format", type=click.Choice(["auto", "text", "json"]), help="Form of the log (auto)."),
            click.option(
                "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Least level (info)."
            ),
        ]
    ):
        command = option(command)
    return _of_gateway(command)


def _configuration(config: Path | None, **flags: object) -> Configuration:
    from sandgate.config import load

    return load(flags, config=config)


@cli.command()
@_of_serve
def serve(config: Path | None, **flags: object) -> None:
    """Run a gateway until Ctrl-C or SIGTERM."""
    configuration = _configuration(config, **flags)
    from sandgate.serve import run

    run(configuration)


@cli.command()
@_of_serve
def doctor(config: Path | None, **flags: object) -> None:
    """Check this machine and say how to mend what is missing."""
    configuration = _configuration(config, **flags)
    from sandgate.doctor import examine

    sys.exit(0 if examine(configuration) else _OPERATIONAL)


@cli.command()
def demo() -> None:
    """Run a gateway and a first script against it, then stop."""
    from sandgate.demo import run

    run()


@cli.group()
def keys() -> None:
    """API keys of a running gateway."""


@keys.command("create")
@click.option("--name", default="", help="What the key is for.")
@click.option("--owner", default="", help="Whose sandboxes the key sees (default).")
@_of_gateway
def create_key(config: Path | None, state_dir: str | None, name: str, owner: str) -> None:
    """Make a key and print it, this once."""
    from sandgate import keys as commands

    commands.create(_configuration(config, state_dir=state_dir).settings.state_dir, name=name, owner=owner)


@keys.command("list")
@_as_json
@_of_gateway
def list_keys(config: Path | None, state_dir: str | None, as_json: bool) -> None:
    """List the keys that are valid."""
    from sandgate import keys as commands

    commands.show_all(_configuration(config, state_dir=state_dir).settings.state_dir, as_json=as_json)


@keys.command("revoke")
@click.argument("key_id", metavar="ID")
@_of_gateway
def revoke_key(config: Path | None, state_dir: str | None, key_id: str) -> None:
    """Make a key invalid, from the next call on."""
    from sandgate import keys as commands

    commands.revoke(_configuration(config, state_dir=state_dir).settings.state_dir, key_id)


@cli.group()
def sandbox() -> None:
    """Sandboxes of a running gateway, whoever owns them."""


@sandbox.command("list")
@_as_json
@_of_gateway
def list_sandboxes(config: Path | None, state_dir: str | None, as_json: bool) -> None:
    """List the sandboxes that exist, newest first."""
    from sandgate import sandboxes as commands

    commands.show_all(_configuration(config, state_dir=state_dir).settings.state_dir, as_json=as_json)


@sandbox.command("info")
@click.argument("sandbox_id", metavar="ID")
@_as_json
@_of_gateway
def show_sandbox(config: Path | None, state_dir: str | None, sandbox_id: str, as_json: bool) -> None:
    """Show one sandbox."""
    from sandgate import sandboxes as commands

    commands.show(_configuration(config, state_dir=state_dir).settings.state_dir, sandbox_id, as_json=as_json)


@sandbox.command("kill")
@click.argument("sandbox_ids", metavar="ID...", nargs=-1, required=True)
@_of_gateway
def kill_sandboxes(config: Path | None, state_dir: str | None, sandbox_ids: tuple[str, ...]) -> None:
    """End sandboxes and everything in them."""
    from sandgate import sandboxes as commands

    commands.kill(_configuration(config, state_dir=state_dir).settings.state_dir, sandbox_ids)
