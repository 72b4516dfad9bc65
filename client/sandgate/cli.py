"""The command line: the program ``sandgate``.

Only names, options and help stand here; each command imports what it does when it is called, so that ``--help`` and
``--version`` answer at once. Every error becomes one line on standard error: exit status 2 for a mistake in how the
command was called or configured, 1 for everything else. A traceback is never shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

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
    return _of_gateway(command)


def _configuration(config: Path | None, *, as_served: bool = False, **flags: object) -> Configuration:
    """``as_served``: with what the gateway's plugins want where nobody says otherwise, for which they are loaded."""
    from sandgate.config import load

    if not as_served:
        return load(flags, config=config)
    from sandgate.plugins import defaults_of

    return load(flags, config=config, defaults=defaults_of)


@cli.command()
@_of_serve
def serve(config: Path | None, **flags: object) -> None:
    """Run a gateway until Ctrl-C or SIGTERM."""
    configuration = _configuration(config, as_served=True, **flags)
    from sandgate.serve import run

    run(configuration)


@cli.command()
@_of_serve
def doctor(config: Path | None, **flags: object) -> None:
    """Check this machine and say how to mend what is missing."""
    configuration = _configuration(config, as_served=True, **flags)
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
@click.option("--team", "--owner", "team", default="", help="Whose sandboxes the key sees (default).")
@click.option("--create-team", is_flag=True, help="Make the team too, without limits, where there is none.")
@_of_gateway
def create_key(config: Path | None, state_dir: str | None, name: str, team: str, create_team: bool) -> None:
    """Make a key and print it, this once."""
    from sandgate import keys as commands

    settings = _configuration(config, state_dir=state_dir).settings
    commands.create(settings.state_dir, name=name, owner=team, create_team=create_team)


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


def _of_team(command: _Command) -> _Command:
    for name, (option, text) in reversed(_LIMITS.items()):
        command = click.option(option, name, callback=_limit, metavar="N|none", help=text)(command)
    return _of_gateway(click.option("--name", help="What people call it.")(command))


def _limits(given: Mapping[str, int | Literal["none"] | None]) -> dict[str, int | None]:
    """Those that were given; None takes one away."""
    return {name: None if value == "none" else value for name, value in given.items() if value is not None}


@teams.command("create")
@click.argument("team_id", metavar="ID")
@_of_team
def create_team(
    config: Path | None, state_dir: str | None, team_id: str, name: str | None, **limits: int | Literal["none"] | None
) -> None:
    """Make a team, with the limits that are named."""
    from sandgate import teams as commands

    folder = _configuration(config, state_dir=state_dir).settings.state_dir
    commands.create(folder, team_id, name=name or "", limits=_limits(limits))


@teams.command("list")
@_as_json
@_of_gateway
def list_teams(config: Path | None, state_dir: str | None, as_json: bool) -> None:
    """List the teams and their limits."""
    from sandgate import teams as commands

    commands.show_all(_configuration(config, state_dir=state_dir).settings.state_dir, as_json=as_json)


@teams.command("set")
@click.argument("team_id", metavar="ID")
@_of_team
def update_team(
    config: Path | None, state_dir: str | None, team_id: str, name: str | None, **limits: int | Literal["none"] | None
) -> None:
    """Change a team; what is not named stays. Limits hold for what is made from then on."""
    if name is None and not _limits(limits):
        raise click.UsageError("name what is to be changed")
    from sandgate import teams as commands

    folder = _configuration(config, state_dir=state_dir).settings.state_dir
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
@_as_json
@_of_gateway
def audit(
    config: Path | None,
    state_dir: str | None,
    since: str | None,
    until: str | None,
    limit: int,
    as_json: bool,
    **filters: str,
) -> None:
    """Show who changed what on a running gateway, newest first."""
    from sandgate.audit import show

    folder = _configuration(config, state_dir=state_dir).settings.state_dir
    show(folder, filters=filters, since=since, until=until, limit=limit, as_json=as_json)


@cli.group()
def sandbox() -> None:
    """Sandboxes of a running gateway, whoever owns them."""


def _pairs(_context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """``NAME=VALUE`` options as a table; the last of one name wins."""
    pairs: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"'{text}' is not NAME=VALUE", param=parameter)
        pairs[name] = value
    return pairs


@sandbox.command("create")
@click.option("--template", default="base", help="What it is made of (base).")
@click.option("--timeout", type=click.IntRange(1), default=300, metavar="SECONDS", help="How long it lives (300).")
@click.option("--metadata", multiple=True, metavar="NAME=VALUE", callback=_pairs, help="A note for finding it again.")
@click.option("--env", "envs", multiple=True, metavar="NAME=VALUE", callback=_pairs, help="A variable of its commands.")
@click.option("--no-internet", is_flag=True, help="Without network.")
@_as_json
@_of_gateway
def create_sandbox(
    config: Path | None,
    state_dir: str | None,
    template: str,
    timeout: int,
    metadata: dict[str, str],
    envs: dict[str, str],
    no_internet: bool,
    as_json: bool,
) -> None:
    """Make a sandbox and print its id."""
    from sandgate import sandboxes as commands

    commands.create(
        _configuration(config, state_dir=state_dir).settings.state_dir,
        template=template,
        timeout=timeout,
        metadata=metadata,
        envs=envs,
        internet=not no_internet,
        as_json=as_json,
    )


@sandbox.command("exec")
@click.argument("sandbox_id", metavar="ID")
@click.argument("command", metavar="-- CMD...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--background", "-d", is_flag=True, help="Print the process id and leave it running.")
@click.option("--tty", "-t", is_flag=True, help="On a terminal, with this one's size and keys.")
@click.option("--env", "-e", "envs", multiple=True, metavar="NAME=VALUE", callback=_pairs, help="A variable.")
@click.option("--cwd", "-w", metavar="DIR", help="Working directory (the user's home).")
@click.option("--user", "-u", help="Account of the sandbox (its default user).")
@click.option("--timeout", type=click.FloatRange(0), metavar="SECONDS", help="Time limit (none).")
@click.option("--tag", help="A label that 'ps' shows.")
@click.option("--no-stdin", "-n", is_flag=True, help="Leave standard input alone.")
@_of_gateway
def execute_command(
    config: Path | None,
    state_dir: str | None,
    sandbox_id: str,
    command: tuple[str, ...],
    background: bool,
    tty: bool,
    envs: dict[str, str],
    cwd: str | None,
    user: str | None,
    timeout: float | None,
    tag: str | None,
    no_stdin: bool,
) -> None:
    """Run a program in a sandbox, as if it ran here.

    No shell reads CMD; for one: -- bash -c '...'. The exit status is the program's, 128 + n after signal n; 124 when the
    time limit passed, 125 when sandgate itself failed. Ctrl-C sends SIGTERM, a second one SIGKILL.
    """
    if background and tty:
        raise click.UsageError("--background and --tty exclude each other")
    from sandgate.console import hold_standard_descriptors, terminal_size

    hold_standard_descriptors()
    from sandgate.client.process_calls import Program
    from sandgate.execution import execute

    forward_input = not (background or no_stdin)
    program = Program(
        argv=command,
        envs={"TERM": os.environ.get("TERM", "xterm"), **envs} if tty else envs,
        cwd=cwd,
        user=user,
        stdin=forward_input,
        tag=tag,
        timeout=timeout,
        size=terminal_size() if tty else None,
    )
    folder = _configuration(config, state_dir=state_dir).settings.state_dir
    sys.exit(execute(folder, sandbox_id, program, background=background, tty=tty, forward_input=forward_input))


@sandbox.command("attach")
@click.argument("sandbox_id", metavar="ID")
@click.argument("pid", metavar="PID", type=click.IntRange(1, (1 << 32) - 1))
@click.option("--replay", is_flag=True, help="First the output that is still retained.")
@click.option(
    "--from", "from_seq", type=click.IntRange(1, (1 << 64) - 1), metavar="NUMBER", help="From this piece of output on."
)
@_of_gateway
def attach_to_process(
    config: Path | None, state_dir: str | None, sandbox_id: str, pid: int, replay: bool, from_seq: int | None
) -> None:
    """Follow a process that runs, to its end.

    Ctrl-C, on a terminal Ctrl-], leaves it running. The exit status is that of 'exec'.
    """
    from sandgate.console import hold_standard_descriptors

    hold_standard_descriptors()
    from sandgate.execution import attach

    folder = _configuration(config, state_dir=state_dir).settings.state_dir
    sys.exit(attach(folder, sandbox_id, pid, from_seq=0 if replay and from_seq is None else from_seq))


@sandbox.command("ps")
@click.argument("sandbox_id", metavar="ID")
@_as_json
@_of_gateway
def list_processes(config: Path | None, state_dir: str | None, sandbox_id: str, as_json: bool) -> None:
    """List the processes of a sandbox that were started through the gateway."""
    from sandgate import processes as commands

    commands.show_all(_configuration(config, state_dir=state_dir).settings.state_dir, sandbox_id, as_json=as_json)


@sandbox.command("kill-process")
@click.argument("sandbox_id", metavar="ID")
@click.argument("pids", metavar="PID...", nargs=-1, required=True, type=click.IntRange(1, (1 << 32) - 1))
@click.option("--term", is_flag=True, help="SIGTERM, which a program may catch, in place of SIGKILL.")
@_of_gateway
def kill_processes(
    config: Path | None, state_dir: str | None, sandbox_id: str, pids: tuple[int, ...], term: bool
) -> None:
    """End processes and what runs in their process groups."""
    from sandgate import processes as commands

    commands.kill(_configuration(config, state_dir=state_dir).settings.state_dir, sandbox_id, pids, gently=term)


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


@cli.group()
def plugin() -> None:
    """Plugins that are installed here, and the beginning of a new one."""


@plugin.command("list")
@_as_json
def list_plugins(as_json: bool) -> None:
    """List the installed plugins: what each offers, and why it cannot be used if it cannot."""
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
