"""The log: what the gateway's processes say, in one stream on standard error.

Children write one JSON object a line. On a terminal it is rendered for people, otherwise it is passed on as it is. A line
that is not JSON (an interpreter's last words) is passed on too. Clients choose parts of what is logged, paths for
example: control characters never reach a terminal.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import IO, Any, Literal

__all__ = ["Lines", "Log", "printable"]

#: C0, DEL, C1, what turns the direction of writing, and what no encoding can write.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
#: Longer lines are passed on in pieces.
_LINE_LIMIT = 256 * 1024
_LEVELS = ("debug", "info", "warning", "error")


def printable(text: str) -> str:
    """One line without anything that a terminal would act on."""
    return _UNSAFE.sub(lambda found: repr(found.group())[1:-1], text)


class Lines:
    """Cuts a stream of bytes into lines, whatever the pieces it arrives in."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that are complete now, without their line feeds."""
        self._rest += data
        while (end := self._rest.find(b"\n")) >= 0:
            yield bytes(self._rest[:end])
            del self._rest[: end + 1]
        if len(self._rest) > _LINE_LIMIT:
            yield self.end()

    def end(self) -> bytes:
        """What stands there without a line feed."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest


class Log:
    """Writes the one stream. Losing it (a closed terminal, a full disk) does not stop the gateway."""

    def __init__(
        self, *, form: Literal["auto", "text", "json"], level: str = "info", stream: IO[str] | None = None
    ) -> None:
        self._stream: IO[str] | None = stream or sys.stderr
        terminal = self._stream is not None and self._stream.isatty()
        text = form == "text" or (form == "auto" and terminal)
        self._render = _renderer(colors=terminal and "NO_COLOR" not in os.environ) if text else None
        self._least = _LEVELS.index(level)

    def say(self, level: Literal["debug", "info", "warning", "error"], event: str, **fields: object) -> None:
        """A line of the front's own."""
        if _LEVELS.index(level) >= self._least:
            stamp = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            self._event({"timestamp": stamp, "level": level, "event": event, "process": "front", **fields})

    def line(self, raw: bytes, *, process: str) -> None:
        """A line of a child."""
        text = raw.decode("utf-8", "replace").rstrip("\r")
        if not text:
            return
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and "event" in event:
            self._event({**event, "process": process})
        else:
            self._write(printable(text))

    def _event(self, event: dict[str, Any]) -> None:
        if self._render is None:
            # ASCII only: a JSON string may hold C1 controls, and a terminal may be the reader after all.
            self._write(json.dumps(event, default=str))
        else:
            self._write(self._render(event))

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


class _Text:
    """Renders one event for people."""

    def __init__(self, *, colors: bool) -> None:
        from structlog.dev import ConsoleRenderer

        self._console = ConsoleRenderer(colors=colors, pad_event_to=24)

    def __call__(self, event: dict[str, Any]) -> str:
        safe = {printable(str(key)): _safe(key, value) for key, value in event.items() if key != "exc_info"}
        if isinstance(stamp := safe.get("timestamp"), str):
            safe["timestamp"] = _local_time(stamp)
        return str(self._console(None, "", safe))


def _renderer(*, colors: bool) -> _Text:
    return _Text(colors=colors)


def _safe(key: str, value: object) -> object:
    if key in {"exception", "stack"}:
        # A traceback keeps its lines.
        return "\n".join(printable(line) for line in str(value).split("\n"))
    if isinstance(value, Mapping | list):
        value = json.dumps(value, ensure_ascii=False, default=str)
    # The renderer takes these three for text without asking.
    return printable(str(value)) if isinstance(value, str) or key in {"event", "level", "logger"} else value


def _local_time(stamp: str) -> str:
    try:
        return datetime.fromisoformat(stamp).astimezone().strftime("%H:%M:%S.%f")[:-3]
    except ValueError:
        return stamp
