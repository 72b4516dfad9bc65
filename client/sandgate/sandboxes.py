"""``sandgate sandbox``: the sandboxes of a running gateway, through the core's ``SandboxService``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from google.protobuf.duration_pb2 import Duration

from sandgate.core_client import Core, connected
from sandgate.logs import printable
from sandgate.tables import show_table, when
from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_errors import InvalidArgument, NotFound, SandgateError

__all__ = ["create", "kill", "show", "show_all"]

_STATES = {
    sandboxes_pb2.SANDBOX_STATE_RUNNING: "running",
    sandboxes_pb2.SANDBOX_STATE_PAUSED: "paused",
}
_ON_TIMEOUT = {
    sandboxes_pb2.ON_TIMEOUT_UNSPECIFIED: "kill",
    sandboxes_pb2.ON_TIMEOUT_KILL: "kill",
    sandboxes_pb2.ON_TIMEOUT_PAUSE: "pause",
}


def create(
    state_dir: Path,
    *,
    template: str,
    timeout: int,
    metadata: Mapping[str, str],
    envs: Mapping[str, str],
    internet: bool,
    as_json: bool,
) -> None:
    """Make a sandbox of the default owner, and print its id alone on standard output, so that a script can catch it."""
    request = sandboxes_pb2.CreateRequest(
        template_id=template,
        timeout=Duration(seconds=timeout),
        metadata=metadata,
        envs=envs,
        secure=True,
        allow_internet_access=internet,
    )
    with connected(state_dir) as core:
        sandbox = core.ask(core.sandboxes.Create, request).sandbox
    click.echo(json.dumps(_record(sandbox), indent=2, ensure_ascii=False) if as_json else sandbox.id)


def show_all(state_dir: Path, *, as_json: bool) -> None:
    """Print every sandbox that exists."""
    with connected(state_dir) as core:
        boxes = _all(core)
    if as_json:
        click.echo(json.dumps([_record(sandbox) for sandbox in boxes], indent=2, ensure_ascii=False))
        return
    rows = [
        (
            box.id,
            _STATES.get(box.state, "unknown"),
            box.template_id,
            box.backend,
            when(box.started_at),
            when(box.end_at),
            _pairs(box),
        )
        for box in boxes
    ]
    show_table(("ID", "STATE", "TEMPLATE", "BACKEND", "STARTED", "ENDS", "METADATA"), rows, nothing="no sandboxes")


def _all(core: Core) -> list[sandboxes_pb2.Sandbox]:
    """Page by page: in one piece they may be more than a message holds."""
    boxes: list[sandboxes_pb2.Sandbox] = []
    request = sandboxes_pb2.ListRequest()
    while True:
        reply = core.ask(core.sandboxes.List, request)
        boxes += reply.sandboxes
        if not reply.next_page_token:
            return boxes
        request = sandboxes_pb2.ListRequest(page_token=reply.next_page_token)


def show(state_dir: Path, sandbox_id: str, *, as_json: bool) -> None:
    """Print all about one sandbox but its token."""
    with connected(state_dir) as core:
        request = sandboxes_pb2.GetRequest(id=sandbox_id)
        sandbox = core.ask(core.sandboxes.Get, request).sandbox
    record = _record(sandbox)
    if as_json:
        click.echo(json.dumps(record, indent=2, ensure_ascii=False))
        return
    for key, value in record.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        click.echo(f"{key + ':':<24}{printable(text)}")


def kill(state_dir: Path, sandbox_ids: Sequence[str]) -> None:
    """End each sandbox; those that exist are ended even when another one does not."""
    refusals: list[SandgateError] = []
    with connected(state_dir) as core:
        for sandbox_id in sandbox_ids:
            try:
                core.ask(core.sandboxes.Kill, sandboxes_pb2.KillRequest(id=sandbox_id))
            except (InvalidArgument, NotFound) as error:
                refusals.append(error)
            else:
                click.echo(f"sandbox {sandbox_id} is ended", err=True)
    if refusals:
        raise type(refusals[0])("; ".join(error.message for error in refusals))


def _record(box: sandboxes_pb2.Sandbox) -> dict[str, Any]:
    return {
        "id": box.id,
        "state": _STATES.get(box.state, "unknown"),
        "template": box.template_id,
        "alias": box.alias,
        "backend": box.backend,
        "started_at": when(box.started_at),
        "end_at": when(box.end_at),
        "on_timeout": _ON_TIMEOUT.get(box.on_timeout, "unknown"),
        "auto_resume": box.auto_resume,
        "metadata": dict(sorted(box.metadata.items())),
        "cpu_count": box.resources.cpu_count,
        "memory_mb": box.resources.memory_mb,
        "disk_size_mb": box.resources.disk_size_mb,
        "allow_internet_access": box.allow_internet_access,
        "envd_version": box.envd_version,
        "secured": bool(box.access_token),
    }


def _pairs(box: sandboxes_pb2.Sandbox) -> str:
    return " ".join(f"{key}={value}" for key, value in sorted(box.metadata.items()))
