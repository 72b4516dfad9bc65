"""``sandgate sandbox ps`` and ``kill-process``: the processes of one sandbox."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from sandgate.client.records import ProcessInfo
from sandgate.execution import opened
from sandgate.tables import show_table
from sandgate_errors import NotFound

__all__ = ["kill", "show_all"]


def show_all(state_dir: Path, sandbox_id: str, *, as_json: bool) -> None:
    """Print the live processes that were started through the gateway."""
    with opened(state_dir, sandbox_id) as sandbox:
        processes = sandbox.commands.list()
    if as_json:
        click.echo(json.dumps([_record(process) for process in processes], indent=2, ensure_ascii=False))
        return
    rows = [
        (str(process.pid), process.kind.value, process.tag or "", shlex.join([process.cmd, *process.args]))
        for process in processes
    ]
    show_table(("PID", "KIND", "TAG", "COMMAND"), rows, nothing="no processes")


def kill(state_dir: Path, sandbox_id: str, pids: Sequence[int], *, gently: bool) -> None:
    """SIGKILL, or SIGTERM, to each; those that exist get it even when another one does not."""
    with opened(state_dir, sandbox_id) as sandbox:
        act = sandbox.commands.terminate if gently else sandbox.commands.kill
        gone = [pid for pid in pids if not act(pid)]
    if gone:
        raise NotFound(f"no such process in sandbox {sandbox_id}: {', '.join(map(str, gone))}")


def _record(process: ProcessInfo) -> dict[str, Any]:
    # Variables are left out: they are where secrets are handed to a command.
    return {
        "pid": process.pid,
        "kind": process.kind.value,
        "tag": process.tag,
        "cmd": process.cmd,
        "args": list(process.args),
        "cwd": process.cwd,
    }
