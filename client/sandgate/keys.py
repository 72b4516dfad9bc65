"""``sandgate keys``: API keys of a running gateway, through the core's ``KeyService``."""

from __future__ import annotations

import json
from pathlib import Path

import click
from google.protobuf.json_format import MessageToDict

from sandgate.core_client import connected
from sandgate.tables import show_table, when
from sandgate_api.core.v1 import keys_pb2
from sandgate_errors import NotFound

__all__ = ["create", "revoke", "show_all"]


def create(state_dir: Path, *, name: str, owner: str, create_team: bool) -> None:
    """Print the new key alone on standard output, so that a script can catch it; the rest goes to standard error."""
    with connected(state_dir) as core:
        request = keys_pb2.CreateKeyRequest(name=name, owner=owner, create_team=create_team)
        try:
            reply = core.ask(core.keys.CreateKey, request)
        except NotFound as error:
            raise NotFound(f"{error.message}: make it with sandgate teams create, or give --create-team too") from error
    click.echo(reply.secret)
    click.echo(f"key {reply.key.id} of team {reply.key.owner}; it is not shown again", err=True)


def show_all(state_dir: Path, *, as_json: bool) -> None:
    """Print what is known of the keys; the keys themselves are not."""
    with connected(state_dir) as core:
        reply = core.ask(core.keys.ListKeys, keys_pb2.ListKeysRequest())
    if as_json:
        items = [
            MessageToDict(key, always_print_fields_with_no_presence=True, preserving_proto_field_name=True)
            for key in reply.keys
        ]
        click.echo(json.dumps(items, indent=2, ensure_ascii=False))
        return
    rows = [(key.id, key.name, key.owner, key.prefix, when(key.created_at), _last_use(key)) for key in reply.keys]
    show_table(("ID", "NAME", "TEAM", "STARTS WITH", "CREATED", "LAST USED"), rows, nothing="no keys")


def _last_use(key: keys_pb2.Key) -> str:
    return when(key.last_used_at) if key.HasField("last_used_at") else "-"


def revoke(state_dir: Path, key_id: str) -> None:
    """Make one key invalid."""
    with connected(state_dir) as core:
        core.ask(core.keys.RevokeKey, keys_pb2.RevokeKeyRequest(id=key_id))
    click.echo(f"key {key_id} is revoked", err=True)
