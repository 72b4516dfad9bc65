"""``make bench``: starts a gateway of its own, measures it, prints the tables, stops it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import TypeVar

from bench import calls, memory, streams, transfers
from bench.containers import NotMeasured, containers
from bench.report import Latency, Throughput, latency_table, throughput_table
from sandgate_testing.gateway import Gateway
from sandgate_testing.leftovers import processes_of

__all__ = ["main"]

_MIB = 1 << 20
_Row = TypeVar("_Row", Latency, Throughput)


def main() -> int:
    options = _options()
    gateway = Gateway(isolation=options.isolation)
    try:
        gateway.start()
        latencies, throughputs, idle = _measure(gateway, options)
        gateway.stop()
    finally:
        gateway.discard()
    print(f"\n{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, {options.isolation}\n")
    print(latency_table(latencies), throughput_table(throughputs), sep="\n\n")
    print(f"\nprivate memory of an idle sandbox: {idle / 1e6:.1f} MB")
    if options.json:
        rows = [*(row.row() for row in latencies), *(row.row() for row in throughputs)]
        options.json.write_text(json.dumps({"rows": rows, "idle sandbox bytes": idle}, indent=1))
    return 0


def _measure(gateway: Gateway, options: argparse.Namespace) -> tuple[list[Latency], list[Throughput], float]:
    rounds, repeats = options.rounds, options.repeats
    latencies = [_told(row) for row in calls.single_calls(gateway, rounds=rounds)]
    latencies.append(_told(calls.creations(gateway, rounds=max(5, rounds // 8))))
    latencies.append(_told(calls.listing(gateway, entries=10_000, rounds=max(5, rounds // 8))))
    if options.containers:
        try:
            latencies += [_told(row) for row in containers(gateway, rounds=rounds)]
        except NotMeasured as reason:
            print(f"no containers are measured: {reason}", file=sys.stderr)
    throughputs = [_told(row) for row in streams.output(gateway, size=options.output * _MIB, rounds=repeats)]
    throughputs += [_told(row) for row in transfers.files(gateway, size=options.transfer * _MIB, rounds=repeats)]
    # Last, because it leaves many sandboxes behind.
    before = memory.private(processes_of(gateway.state_dir))
    latencies.append(_told(calls.with_many_alive(gateway, few=5, many=options.alive, rounds=rounds)))
    idle = (memory.private(processes_of(gateway.state_dir)) - before) / options.alive
    return latencies, throughputs, idle


def _told(row: _Row) -> _Row:
    print(f"measured {row.name}", file=sys.stderr, flush=True)
    return row


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--isolation", choices=["bubblewrap", "none"], default="bubblewrap")
    parser.add_argument("--rounds", type=int, default=200, help="of each call (default: 200)")
    parser.add_argument("--repeats", type=int, default=3, help="of each throughput, the best counts (default: 3)")
    parser.add_argument("--output", type=int, default=512, help="MiB of a command's output (default: 512)")
    parser.add_argument("--transfer", type=int, default=1024, help="MiB of the file sent each way (default: 1024)")
    parser.add_argument("--alive", type=int, default=50, help="sandboxes alive at once, at least 6 (default: 50)")
    parser.add_argument(
        "--containers", action=argparse.BooleanOptionalAction, default=True, help="measure the Docker backend too"
    )
    parser.add_argument("--json", type=Path, help="write the figures there too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
