"""The ``Range`` header: which bytes of a file of known size are asked for (RFC 9110 section 14)."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["ByteRange", "UnsatisfiableRange", "parse_ranges"]

# Each range is a call of its own to the agent; nobody reads a file in more pieces at once than this.
_MAX_RANGES = 32
_SPEC = re.compile(r"([0-9]{0,18})-([0-9]{0,18})")


class UnsatisfiableRange(Exception):
    """No byte of the file is asked for, or the header cannot be read: 416."""


@dataclass(frozen=True)
class ByteRange:
    """A run of bytes, at least one."""

    start: int
    length: int

    def content_range(self, size: int) -> str:
        return f"bytes {self.start}-{self.start + self.length - 1}/{size}"


def parse_ranges(header: str, size: int) -> list[ByteRange]:
    """The ranges in the order asked for; none: send the whole file.

    The whole file is also the answer to a unit that is not bytes, to a file without bytes, and to ranges that overlap so
    much, or are so many, that they can only be meant to make work. Raises UnsatisfiableRange.
    """
    unit, _, specs = header.partition("=")
    if unit.strip().lower() != "bytes" or size == 0:
        return []
    asked = [spec.strip() for spec in specs.split(",") if spec.strip()]
    if not asked:
        raise UnsatisfiableRange
    if len(asked) > _MAX_RANGES:
        return []
    ranges = [found for spec in asked if (found := _parse_spec(spec, size)) is not None]
    if not ranges:
        raise UnsatisfiableRange
    return ranges if sum(found.length for found in ranges) <= size else []


def _parse_spec(spec: str, size: int) -> ByteRange | None:
    """One range, cut to the file; None when it lies behind the end."""
    match = _SPEC.fullmatch(spec)
    if match is None or spec == "-":
        raise UnsatisfiableRange
    first, last = match.groups()
    if not first:
        length = min(int(last), size)
        return ByteRange(size - length, length) if length else None
    start, end = int(first), int(last) if last else size - 1
    if last and end < start:
        raise UnsatisfiableRange
    return ByteRange(start, min(end, size - 1) - start + 1) if start < size else None
