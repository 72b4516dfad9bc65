"""Tables for people and for pipes: rich on a terminal, plain columns otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC
from typing import TYPE_CHECKING

import click

from sandgate.logs import printable

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

__all__ = ["show_table", "when"]


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, nothing: str) -> None:
    """Print rows below headings; ``nothing`` goes to standard error when there are none."""
    if not rows:
        click.echo(nothing, err=True)
        return
    # Metadata and names are the clients' own choice.
    safe = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich(headings, safe)
    else:
        _plain(headings, safe)


def _plain(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _rich(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading == "ID")
    for row in rows:
        # Text, since a plain string would be read as markup.
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def when(stamp: Timestamp) -> str:
    """A time in UTC, to the second; empty when it is not set."""
    if not stamp.seconds:
        return ""
    return stamp.ToDatetime(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
