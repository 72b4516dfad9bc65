"""``python -m bench.soak``: many sandboxes at once, many one after another, and what is left of them.

Four questions. What does a call cost when many sandboxes live, compared with few of them? How exact are their ends while
commands run? After many creates and kills: do memory, descriptors, processes, folders or rows of the store grow with
their number? (Judged between a first part, after which caches and pools are as full as they get, and the end.) And what
does a list cost among 10,000 records (:mod:`bench.paper`)?
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench import memory, paper
from sandgate_edge.connect.envelope import pack
from sandgate_testing.gateway import Gateway
from sandgate_testing.leftovers import processes_of, sandboxes_of

__all__ = ["main"]

_FEW = 5
_PAGE = 100
#: Commands that run at any time while ends are measured.
_BUSY = 4
_MIB = 1 << 20
#: Seconds without a change after which a gateway is at rest, and how long that may take.
_CALM = 3.0
_PATIENCE = 120.0


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a gateway holds, apart from sandboxes that live."""

    processes: int
    descriptors: int
    memory: int
    folders: int
    live_rows: int


def main() -> int:
    options = _options()
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, {options.isolation}")
    gateway = Gateway(isolation=options.isolation)
    try:
        gateway.start()
        for part in (_crowd, _churn, _deadlines):
            _tell(part(gateway, options))
        gateway.stop()
        left = gateway.remains()
        _tell({"left at the end": left})
    finally:
        gateway.discard()
    _tell(_records(options))
    return 1 if left else 0


def _tell(figures: dict[str, object]) -> None:
    """At once, with the load of the moment: a part takes minutes, and a machine does not stay as it is."""
    print(json.dumps({"load": round(os.getloadavg()[0], 1), **figures}, indent=1), flush=True)


def _crowd(gateway: Gateway, options: argparse.Namespace) -> dict[str, object]:
    """The same calls with few and with many sandboxes alive; and what one more costs."""
    with _alive(gateway, _FEW):
        few = _medians(gateway, options.rounds)
    before = memory.private(processes_of(gateway.state_dir))
    began = time.perf_counter()
    with _alive(gateway, options.alive):
        took = time.perf_counter() - began
        idle = (memory.private(processes_of(gateway.state_dir)) - before) / options.alive
        many = _medians(gateway, options.rounds)
    return {
        f"ms at {_FEW} sandboxes": few,
        f"ms at {options.alive} sandboxes": many,
        "ratio": {name: round(many[name] / few[name], 2) for name in few},
        "creates per second while filling": round(options.alive / took, 1),
        "MiB for each idle sandbox": round(idle / _MIB, 1),
    }


def _churn(gateway: Gateway, options: argparse.Namespace) -> dict[str, object]:
    """Creates and kills one after another."""
    first = max(1, options.churn // 4)
    _rounds(gateway, first)
    early = _settled(gateway)
    began = time.perf_counter()
    _rounds(gateway, options.churn - first)
    took = time.perf_counter() - began
    late = _settled(gateway)
    return {
        "create and kill, per second": round((options.churn - first) / took, 1),
        f"after {first}": asdict(early),
        f"after {options.churn}": asdict(late),
    }


def _deadlines(gateway: Gateway, options: argparse.Namespace) -> dict[str, object]:
    """Sandboxes that end one after another while commands run in another; by the gateway's own history of each."""
    busy = gateway.create_sandbox(timeout=3600)
    stop = threading.Event()
    workers = [threading.Thread(target=_run_commands, args=(gateway, busy, stop)) for _ in range(_BUSY)]
    for worker in workers:
        worker.start()
    try:
        ends: dict[str, datetime] = {}
        for number in range(options.deadlines):
            # Each has a while yet when the last is made, and then they end in quick succession.
            made = gateway.create_sandbox(timeout=10 + (options.deadlines - number) // 4)
            ends[made["sandboxID"]] = _time(gateway.rest("GET", f"/sandboxes/{made['sandboxID']}").json()["endAt"])
        late = [_began_to_end(gateway, name) - end for name, end in ends.items()]
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    _kill(gateway, busy["sandboxID"])
    milliseconds = sorted(1000 * each.total_seconds() for each in late)
    return {
        f"ms late, {len(milliseconds)} ends under load": {
            "least": round(milliseconds[0], 1),
            "median": round(statistics.median(milliseconds), 1),
            "most": round(milliseconds[-1], 1),
        }
    }


def _run_commands(gateway: Gateway, sandbox: dict[str, Any], stop: threading.Event) -> None:
    headers = {**_to_agent(sandbox), "Content-Type": "application/connect+json"}
    body = pack(0, json.dumps({"process": {"cmd": "/bin/true"}}).encode())
    while not stop.is_set():
        gateway.call("POST", "/process.Process/Start", body, headers=headers)


def _began_to_end(gateway: Gateway, name: str) -> datetime:
    """When the gateway acted on the end, from the sandbox's logs."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        for line in gateway.rest("GET", f"/v2/sandboxes/{name}/logs").json()["logs"]:
            if line["fields"].get("to") == "killing":
                return _time(line["timestamp"])
        time.sleep(0.2)
    raise RuntimeError(f"sandbox {name} does not end")


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


class _PaperGateway(Gateway):
    def _command(self, port: str) -> list[str]:
        command = super()._command(port)
        at = command.index("--isolation")
        return [*command[:at], "--backend", "paper", *command[at + 2 :]]


def _records(options: argparse.Namespace) -> dict[str, object]:
    """Lists among many records; paused ones, so that nothing but the gateway works."""
    with paper.installed():
        gateway = _PaperGateway(isolation="none")
        try:
            gateway.start()
            for number in range(options.records):
                name = gateway.create_sandbox(timeout=3600, metadata={"odd": str(number % 2)})["sandboxID"]
                if gateway.rest("POST", f"/sandboxes/{name}/pause", {"memory": False}).status != 204:
                    raise RuntimeError("a sandbox could not be paused")
            page = f"/v2/sandboxes?limit={_PAGE}&state=paused"
            token = gateway.rest("GET", page).headers["x-next-token"]
            lists = {
                f"a page of {_PAGE}": page,
                "the second page": f"{page}&nextToken={quote(token)}",
                "half of them by metadata": f"{page}&metadata=odd%3D1",
                "none by metadata": f"{page}&metadata=odd%3D2",
            }
            found = {what: _median(partial(gateway.rest, "GET", path), options.rounds) for what, path in lists.items()}
        finally:
            gateway.discard()
    return {f"ms of lists among {options.records} records": found}


def _rounds(gateway: Gateway, number: int) -> None:
    for _ in range(number):
        sandbox = gateway.create_sandbox()["sandboxID"]
        _kill(gateway, sandbox)


@contextmanager
def _alive(gateway: Gateway, number: int) -> Iterator[None]:
    made = [gateway.create_sandbox(timeout=3600)["sandboxID"] for _ in range(number)]
    try:
        yield
    finally:
        for sandbox in made:
            _kill(gateway, sandbox)


def _kill(gateway: Gateway, sandbox: str) -> None:
    answer = gateway.rest("DELETE", f"/sandboxes/{sandbox}")
    if answer.status != 204:
        raise RuntimeError(f"a sandbox could not be killed: {answer}")


def _medians(gateway: Gateway, rounds: int) -> dict[str, float]:
    """Milliseconds of each kind of call."""
    sandbox = gateway.create_sandbox()
    name = sandbox["sandboxID"]
    to_agent = {**_to_agent(sandbox), "Content-Type": "application/json"}
    start = {**_to_agent(sandbox), "Content-Type": "application/connect+json"}
    command = pack(0, json.dumps({"process": {"cmd": "/bin/true"}}).encode())
    calls: dict[str, Callable[[], object]] = {
        "info": lambda: gateway.rest("GET", f"/sandboxes/{name}"),
        "list a page of 5": lambda: gateway.rest("GET", "/v2/sandboxes?limit=5"),
        "timeout": lambda: gateway.rest("POST", f"/sandboxes/{name}/timeout", {"timeout": 300}),
        "processes": lambda: gateway.call("POST", "/process.Process/List", b"{}", headers=to_agent),
        "a command": lambda: gateway.call("POST", "/process.Process/Start", command, headers=start),
        "read a file": lambda: gateway.call("GET", "/files?path=/etc/hostname", headers=_to_agent(sandbox)),
        "metrics": lambda: gateway.rest("GET", f"/sandboxes/{name}/metrics"),
        "create and kill": lambda: _rounds(gateway, 1),
    }
    try:
        return {what: _median(call, rounds) for what, call in calls.items()}
    finally:
        _kill(gateway, name)


def _to_agent(sandbox: dict[str, Any]) -> dict[str, str]:
    return {
        "E2b-Sandbox-Id": sandbox["sandboxID"],
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": sandbox["envdAccessToken"],
    }


def _median(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return round(1000 * statistics.median(times), 2)


def _settled(gateway: Gateway) -> Footprint:
    """Once nothing is made or removed any more: the sandboxes that wait in the pool count too, and a churn empties it."""
    end = time.monotonic() + _PATIENCE
    before = _footprint(gateway)
    while time.monotonic() < end:
        time.sleep(_CALM)
        now = _footprint(gateway)
        if (now.processes, now.folders) == (before.processes, before.folders):
            return now
        before = now
    raise RuntimeError(f"the gateway does not come to rest: {before}")


def _footprint(gateway: Gateway) -> Footprint:
    pids = list(processes_of(gateway.state_dir))
    return Footprint(
        processes=len(pids),
        descriptors=sum(_descriptors(pid) for pid in pids),
        memory=memory.private(pids),
        folders=len(sandboxes_of(gateway.state_dir)),
        live_rows=_live_rows(gateway.state_dir / "sandgate.db"),
    )


def _descriptors(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


def _live_rows(database: Path) -> int:
    """Records that have not ended; ended ones are kept for a week on purpose."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        (number,) = connection.execute("SELECT count(*) FROM sandboxes WHERE ended_at IS NULL").fetchone()
    return int(number)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--isolation", choices=["bubblewrap", "none"], default="bubblewrap")
    parser.add_argument("--alive", type=int, default=500, help="sandboxes that live at the same time")
    parser.add_argument("--churn", type=int, default=2000, help="creates and kills one after another")
    parser.add_argument("--deadlines", type=int, default=100, help="sandboxes that end under load")
    parser.add_argument("--records", type=int, default=10_000, help="records to list")
    parser.add_argument("--rounds", type=int, default=50, help="calls of each kind")
    options = parser.parse_args()
    if options.records <= _PAGE:
        parser.error(f"--records must be more than the {_PAGE} of one page")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
