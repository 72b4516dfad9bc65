"""``python -m bench.soak_commands``: what commands must withstand for minutes, too long for a test; prints what it found as a table.

Each trial checks every byte and status, and fails the run when one is wrong; the table says how long it took and what the
gateway and its sandbox held afterwards more than before.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from e2b import AsyncSandbox, CommandExitException

from bench import memory
from sandgate_testing.gateway import Gateway
from sandgate_testing.leftovers import processes_of

__all__ = ["main"]

_LINES = 100_000
_OUT, _ERR = 1000, 300


@dataclass(frozen=True, kw_only=True)
class Held:
    """What processes hold: all of them together."""

    processes: int
    descriptors: int
    threads: int
    zombies: int
    private: int

    @classmethod
    def by(cls, gateway: Gateway) -> Held:
        pids = list(processes_of(gateway.state_dir))
        return cls(
            processes=len(pids),
            descriptors=sum(_entries(pid, "fd") for pid in pids),
            threads=sum(_entries(pid, "task") for pid in pids),
            zombies=sum(_state(pid) == "Z" for pid in pids),
            private=memory.private(pids),
        )


def main() -> int:
    options = _options()
    gateway = Gateway(isolation=options.isolation)
    try:
        gateway.start()
        asyncio.run(_all(gateway, options))
        gateway.stop()
    finally:
        gateway.discard()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.soak_commands", description=__doc__)
    parser.add_argument("--isolation", choices=["bubblewrap", "none"], default="bubblewrap")
    parser.add_argument("--commands", type=int, default=10_000, help="short commands, 50 at a time (default: 10000)")
    parser.add_argument("--cancelled", type=int, default=3_000, help="starts cancelled at random (default: 3000)")
    parser.add_argument("--outputs", type=int, default=5, help="times 100 MB and 30 MB of output (default: 5)")
    return parser.parse_args()


async def _all(gateway: Gateway, options: argparse.Namespace) -> None:
    sandbox = await AsyncSandbox.create(timeout=7200, **gateway.sdk_options)
    await asyncio.gather(*(sandbox.commands.run("true") for _ in range(50)))
    print("| trial | seconds | processes | descriptors | threads | zombies | private MB | peak + MB |")
    print("|---|---|---|---|---|---|---|---|")
    trials: list[tuple[str, Callable[[AsyncSandbox], Awaitable[None]]]] = [
        (f"{options.commands} short commands, 50 at a time", lambda box: short_commands(box, options.commands)),
        (f"{options.cancelled} starts cancelled at random", lambda box: cancelled_starts(box, options.cancelled)),
        (
            f"{options.outputs} times 100 MB of stdout and 30 MB of stderr",
            lambda box: much_output(box, options.outputs),
        ),
    ]
    for name, trial in trials:
        await _told(gateway, sandbox, name, trial)
    await sandbox.kill()


async def _told(
    gateway: Gateway, sandbox: AsyncSandbox, name: str, trial: Callable[[AsyncSandbox], Awaitable[None]]
) -> None:
    before = Held.by(gateway)
    pids = list(processes_of(gateway.state_dir))
    memory.forget_peaks(pids)
    peak = memory.peak(pids)
    began = time.perf_counter()
    await trial(sandbox)
    seconds = time.perf_counter() - began
    assert await sandbox.commands.list() == []
    await asyncio.sleep(1)
    after = Held.by(gateway)
    grown = memory.peak(pids) - peak
    print(
        f"| {name} | {seconds:.1f} | {after.processes - before.processes:+d} | {after.descriptors - before.descriptors:+d} | "
        f"{after.threads - before.threads:+d} | {after.zombies} | {(after.private - before.private) / 1e6:+.1f} | "
        f"{grown / 1e6:.1f} |",
        flush=True,
    )


async def short_commands(sandbox: AsyncSandbox, count: int) -> None:
    """Each with its own output and status."""
    gate = asyncio.Semaphore(50)

    async def one(number: int) -> None:
        async with gate:
            try:
                result = await sandbox.commands.run(f"echo {number}; exit {number % 5}", timeout=300)
                said = (result.stdout, result.exit_code)
            except CommandExitException as error:
                said = (error.stdout, error.exit_code)
        assert said == (f"{number}\n", number % 5), said

    await asyncio.gather(*(one(number) for number in range(count)))


async def cancelled_starts(sandbox: AsyncSandbox, count: int) -> None:
    """Afterwards the list shows what runs, and can end it."""

    async def one(moment: float) -> None:
        task = asyncio.ensure_future(sandbox.commands.run("sleep 7200", background=True, timeout=0))
        await asyncio.sleep(moment)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    # The SDK leaves tasks of its own behind when it is cancelled, and the loop complains of each.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    rest = count
    while rest > 0:
        batch = min(rest, 50)
        await asyncio.gather(*(one(random.random() * 0.03) for _ in range(batch)))
        rest -= batch
        # A request that was on its way when its client left starts its command all the same.
        await asyncio.sleep(0.2)
        for process in await sandbox.commands.list():
            await sandbox.commands.kill(process.pid)


async def much_output(sandbox: AsyncSandbox, count: int) -> None:
    """By hash, in pieces: the client must not be what grows."""
    script = (
        f"import sys\nfor i in range({_LINES}):\n"
        f"    sys.stdout.write(f'{{i:0>{_OUT - 1}}}\\n'); sys.stderr.write(f'{{i:0>{_ERR - 1}}}\\n')\n"
    )
    await sandbox.files.write("/tmp/output.py", script)
    expected = tuple(
        hashlib.sha256("".join(f"{i:0>{width - 1}}\n" for i in range(_LINES)).encode()).digest()
        for width in (_OUT, _ERR)
    )
    for _ in range(count):
        out, err = hashlib.sha256(), hashlib.sha256()
        await sandbox.commands.run(
            "python3 /tmp/output.py",
            timeout=0,
            on_stdout=lambda text, out=out: out.update(text.encode()),
            on_stderr=lambda text, err=err: err.update(text.encode()),
        )
        assert (out.digest(), err.digest()) == expected


def _entries(pid: int, folder: str) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/{folder}"))
    except OSError:
        return 0


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
