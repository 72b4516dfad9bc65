"""The command line's part about sandboxes: ``sandgate sandbox``. As in :mod:`sandgate.cli`, only names, options and help."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from sandgate.options import as_json_option, name_values, of_gateway

__all__ = ["sandbox"]


@click.group()
def sandbox() -> None:
    """Sandboxes of a running gateway, whoever owns them."""


@sandbox.command("create")
@click.option("--template", default="base", help="What it is made of (base).")
@click.option("--timeout", type=click.IntRange(1), default=300, metavar="SECONDS", help="How long it lives (300).")
@click.option(
    "--metadata", multiple=True, metavar="NAME=VALUE", callback=name_values, help="A note for finding it again."
)
@click.option(
    "--env", "envs", multiple=True, metavar="NAME=VALUE", callback=name_values, help="A variable of its commands."
)
@click.option("--no-internet", is_flag=True, help="Without network.")
@as_json_option
@of_gateway
def create_sandbox(
    folder: Path,
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
        folder,
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
@click.option("--env", "-e", "envs", multiple=True, metavar="NAME=VALUE", callback=name_values, help="A variable.")
@click.option("--cwd", "-w", metavar="DIR", help="Working directory (the user's home).")
@click.option("--user", "-u", help="Account of the sandbox (its default user).")
@click.option("--timeout", type=click.FloatRange(0), metavar="SECONDS", help="Time limit (none).")
@click.option("--tag", help="A label that 'ps' shows.")
@click.option("--no-stdin", "-n", is_flag=True, help="Leave standard input alone.")
@of_gateway
def execute_command(
    folder: Path,
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
    sys.exit(execute(folder, sandbox_id, program, background=background, tty=tty, forward_input=forward_input))


@sandbox.command("attach")
@click.argument("sandbox_id", metavar="ID")
@click.argument("pid", metavar="PID", type=click.IntRange(1, (1 << 32) - 1))
@click.option("--replay", is_flag=True, help="First the output that is still retained.")
@click.option(
    "--from", "from_seq", type=click.IntRange(1, (1 << 64) - 1), metavar="NUMBER", help="From this piece of output on."
)
@of_gateway
def attach_to_process(folder: Path, sandbox_id: str, pid: int, replay: bool, from_seq: int | None) -> None:
    """Follow a process that runs, to its end.

    Ctrl-C, on a terminal Ctrl-], leaves it running. The exit status is that of 'exec'.
    """
    from sandgate.console import hold_standard_descriptors

    hold_standard_descriptors()
    from sandgate.execution import attach

    sys.exit(attach(folder, sandbox_id, pid, from_seq=0 if replay and from_seq is None else from_seq))


@sandbox.command("ps")
@click.argument("sandbox_id", metavar="ID")
@as_json_option
@of_gateway
def list_processes(folder: Path, sandbox_id: str, as_json: bool) -> None:
    """List the processes of a sandbox that were started through the gateway."""
    from sandgate import processes as commands

    commands.show_all(folder, sandbox_id, as_json=as_json)


@sandbox.command("kill-process")
@click.argument("sandbox_id", metavar="ID")
@click.argument("pids", metavar="PID...", nargs=-1, required=True, type=click.IntRange(1, (1 << 32) - 1))
@click.option("--term", is_flag=True, help="SIGTERM, which a program may catch, in place of SIGKILL.")
@of_gateway
def kill_processes(folder: Path, sandbox_id: str, pids: tuple[int, ...], term: bool) -> None:
    """End processes and what runs in their process groups."""
    from sandgate import processes as commands

    commands.kill(folder, sandbox_id, pids, gently=term)


@sandbox.command("list")
@as_json_option
@of_gateway
def list_sandboxes(folder: Path, as_json: bool) -> None:
    """List the sandboxes that exist, newest first."""
    from sandgate import sandboxes as commands

    commands.show_all(folder, as_json=as_json)


@sandbox.command("info")
@click.argument("sandbox_id", metavar="ID")
@as_json_option
@of_gateway
def show_sandbox(folder: Path, sandbox_id: str, as_json: bool) -> None:
    """Show one sandbox."""
    from sandgate import sandboxes as commands

    commands.show(folder, sandbox_id, as_json=as_json)


@sandbox.command("kill")
@click.argument("sandbox_ids", metavar="ID...", nargs=-1, required=True)
@of_gateway
def kill_sandboxes(folder: Path, sandbox_ids: tuple[str, ...]) -> None:
    """End sandboxes and everything in them."""
    from sandgate import sandboxes as commands

    commands.kill(folder, sandbox_ids)
