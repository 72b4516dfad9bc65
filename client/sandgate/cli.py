"""The command line: the program ``sandgate``.

Only names, options and help stand here (those of ``sandgate sandbox``: :mod:`sandgate.sandbox_cli`); each command imports
what it does when it is called, so that ``--help`` and ``--version`` answer at once. Every error becomes one line on standard
error: exit status 2 for a mistake in how the command was called or configured, 1 for everything else. A traceback is never
shown.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import click

from sandgate.options import Command, as_json_option, configuration, of_gateway, of_serve
from sandgate.sandbox_cli import sandbox
from sandgate_errors import InvalidArgument, SandgateError

__all__ = ["cli", "main"]

_OPERATIONAL = 1
_USAGE = 2
_INTERRUPTED = 130


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


@cli.command()
@of_serve
def serve(config: Path | None, **flags: object) -> None:
    """Run a gateway until Ctrl-C or SIGTERM."""
    settled = configuration(config, as_served=True, **flags)
    from sandgate.serve import run

    run(settled)


@cli.command()
@of_serve
def doctor(config: Path | None, **flags: object) -> None:
    """Check this machine and say how to mend what is missing."""
    settled = configuration(config, as_served=True, **flags)
    from sandgate.doctor import examine

    sys.exit(0 if examine(settled) else _OPERATIONAL)


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
@click.option("--team", "--owner", "team", default="", help="Whose sandboxes the key sees (default).")
@click.option("--create-team", is_flag=True, help="Make the team too, without limits, where there is none.")
@of_gateway
def create_key(folder: Path, name: str, team: str, create_team: bool) -> None:
    """Make a key and print it, this once."""
    from sandgate import keys as commands

    commands.create(folder, name=name, owner=team, create_team=create_team)


@keys.command("list")
@as_json_option
@of_gateway
def list_keys(folder: Path, as_json: bool) -> None:
    """List the keys that are valid."""
    from sandgate import keys as commands

    commands.show_all(folder, as_json=as_json)


@keys.command("revoke")
@click.argument("key_id", metavar="ID")
@of_gateway
def revoke_key(folder: Path, key_id: str) -> None:
    """Make a key invalid, from the next call on."""
    from sandgate import keys as commands

    commands.revoke(folder, key_id)


@cli.group()
def teams() -> None:
    """Teams of a running gateway: who owns keys and sandboxes, and how much each may have."""


def _limit(_context: click.Context, parameter: click.Parameter, given: str | None) -> int | Literal["none"] | None:
    """A whole number, or the word that takes a limit away."""
    if given is None or given == "none":
        return given  # type: ignore[return-value]
    if not (given.isascii() and given.isdecimal()) or len(given) > len(str(2**31)):
        raise click.BadParameter(f"'{given}' is neither a whole number nor 'none'", param=parameter)
    return int(given)


_LIMITS = {
    "max_sandboxes": ("--max-sandboxes", "Sandboxes that it may have at a time."),
    "max_cpus": ("--max-cpus", "CPUs of all its sandboxes together."),
    "max_memory_mb": ("--max-memory", "MiB of memory of all its sandboxes together."),
    "max_life": ("--max-life", "Seconds that one sandbox may live."),
    "creates_per_minute": ("--create-rate", "Sandboxes that it may make in a minute."),
}


def _of_team(command: Command) -> Command:
    for name, (option, text) in reversed(_LIMITS.items()):
        command = click.option(option, name, callback=_limit, metavar="N|none", help=text)(command)
    return of_gateway(click.option("--name", help="What people call it.")(command))


def _limits(given: Mapping[str, int | Literal["none"] | None]) -> dict[str, int | None]:
    """Those that were given; None takes one away."""
    return {name: None if value == "none" else value for name, value in given.items() if value is not None}


@teams.command("create")
@click.argument("team_id", metavar="ID")
@_of_team
def create_team(folder: Path, team_id: str, name: str | None, **limits: int | Literal["none"] | None) -> None:
    """Make a team, with the limits that are named."""
    from sandgate import teams as commands

    commands.create(folder, team_id, name=name or "", limits=_limits(limits))


@teams.command("list")
@as_json_option
@of_gateway
def list_teams(folder: Path, as_json: bool) -> None:
    """List the teams and their limits."""
    from sandgate import teams as commands

    commands.show_all(folder, as_json=as_json)


@teams.command("set")
@click.argument("team_id", metavar="ID")
@_of_team
def update_team(folder: Path, team_id: str, name: str | None, **limits: int | Literal["none"] | None) -> None:
    """Change a team; what is not named stays. Limits hold for what is made from then on."""
    if name is None and not _limits(limits):
        raise click.UsageError("name what is to be changed")
    from sandgate import teams as commands

    commands.update(folder, team_id, name=name, limits=_limits(limits))


@cli.command()
@click.option("--team", default="", help="Of one team's keys.")
@click.option("--key", default="", help="Of one key, by id or name.")
@click.option("--sandbox", "subject", default="", metavar="ID", help="About one sandbox, key or team.")
@click.option("--action", default="", help="Of one kind, 'sandbox.create', or of a group, 'sandbox'.")
@click.option("--outcome", default="", help="With one outcome: 'OK', 'NOT_FOUND'.")
@click.option("--request", "request_id", default="", metavar="ID", help="Of one request.")
@click.option("--since", metavar="TIME", help="From then on: '2h', '7d' ago, or ISO 8601.")
@click.option("--until", metavar="TIME", help="Before then.")
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=100, metavar="N", help="At most so many (100).")
@as_json_option
@of_gateway
def audit(
    folder: Path,
    since: str | None,
    until: str | None,
    limit: int,
    as_json: bool,
    **filters: str,
) -> None:
    """Show who changed what on a running gateway, newest first."""
    from sandgate.audit import show

    show(folder, filters=filters, since=since, until=until, limit=limit, as_json=as_json)


cli.add_command(sandbox)


@cli.group()
def plugin() -> None:
    """Plugins that are installed here, and the beginning of a new one."""


@plugin.command("list")
@as_json_option
def list_plugins(as_json: bool) -> None:
    """List the installed plugins, what each offers, and its faults."""
    from sandgate.plugins import show_all

    show_all(as_json=as_json)


@plugin.command("check")
@click.argument("name", metavar="NAME")
def check_plugin(name: str) -> None:
    """Check that a plugin can be used: its version of the API, its import, its hooks and backends.

    NAME is its entry point's or its distribution's. The exit status is 1 when anything is wrong.
    """
    from sandgate.plugins import check

    sys.exit(0 if check(name) else _OPERATIONAL)


@plugin.command("new")
@click.argument("name", metavar="NAME")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Where to write it (./sandgate-plugin-NAME).")
def new_plugin(name: str, folder: Path | None) -> None:
    """Write a backend of your own to begin with: one that works, its tests and its README."""
    from sandgate.skeleton import write

    write(name, folder)
