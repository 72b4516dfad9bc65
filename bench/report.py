"""What was measured, as a table for people and as JSON for comparisons.

Absolute figures belong to the machine and to what else it did; the ratio to the baseline of the same run is what can be
compared between machines and days.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Latency", "Throughput", "latency_table", "throughput_table"]


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Seconds of each round of a call, and of its baseline taken in turns with it."""

    name: str
    baseline_name: str
    rounds: Sequence[float]
    baseline: Sequence[float]
    #: CPU seconds that all rounds cost the gateway and its sandboxes; None where it was not measured.
    processor: float | None = None

    def row(self) -> dict[str, float | int | str]:
        ours, plain = statistics.median(self.rounds), statistics.median(self.baseline)
        return {
            "what": self.name,
            "rounds": len(self.rounds),
            "p50 ms": 1000 * ours,
            "p99 ms": 1000 * _percentile(self.rounds, 99),
            "CPU ms": "" if self.processor is None else 1000 * self.processor / len(self.rounds),
            "next to": self.baseline_name,
            "its p50 ms": 1000 * plain,
            "its p99 ms": 1000 * _percentile(self.baseline, 99),
            "ratio": ours / plain,
            "on top ms": 1000 * (ours - plain),
        }


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Bytes per second of the best round, and of the baseline's, and what the gateway's memory grew by at its peak."""

    name: str
    baseline_name: str
    rate: float
    baseline: float
    grown: int
    #: Of ours to the baseline in rounds taken in turns, the median; None: that of the two best.
    in_turns: float | None = None
    #: CPU seconds that a GiB cost the gateway and its sandbox; None where it was not measured.
    processor: float | None = None

    def row(self) -> dict[str, float | int | str]:
        return {
            "what": self.name,
            "MB/s": self.rate / 1e6,
            "next to": self.baseline_name,
            "its MB/s": self.baseline / 1e6,
            "ratio": self.rate / self.baseline if self.in_turns is None else self.in_turns,
            "CPU s/GiB": "" if self.processor is None else self.processor,
            "memory + MB": self.grown / 1e6,
        }


def latency_table(rows: Sequence[Latency]) -> str:
    return _table([row.row() for row in rows])


def throughput_table(rows: Sequence[Throughput]) -> str:
    return _table([row.row() for row in rows])


def _percentile(values: Sequence[float], percent: int) -> float:
    """The nearest value that was really measured; interpolating would invent one between two outliers."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, len(ranked) * percent // 100)]


def _table(rows: Sequence[dict[str, float | int | str]]) -> str:
    if not rows:
        return "(nothing measured)"
    cells = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    numeric = [not isinstance(value, str) for value in rows[0].values()]
    lines = [
        " | ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        )
        for line in cells
    ]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def _text(value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
