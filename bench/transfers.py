"""Throughput of a large file each way, next to a bare server of the same kind, by a client that costs next to nothing."""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping

from bench import memory, processor
from bench.report import Throughput
from sandgate_testing.gateway import Gateway
from sandgate_testing.leftovers import processes_of
from sandgate_testing.raw_http import drain, request

__all__ = ["files"]

_BLOCK = bytes(range(256)) * 4096
_Address = tuple[str, int]


def files(gateway: Gateway, *, size: int, rounds: int) -> Iterator[Throughput]:
    """A file of ``size`` bytes up, then down."""
    sandbox = gateway.create_sandbox(timeout=3600)
    headers = {
        "E2b-Sandbox-Id": sandbox["sandboxID"],
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": sandbox["envdAccessToken"],
    }
    size -= size % len(_BLOCK)
    with _bare_server() as bare:
        for name, transfer in (("upload", _upload), ("download", _download)):
            pids = list(processes_of(gateway.state_dir))
            memory.forget_peaks(pids)
            before = memory.peak(pids)
            used = 0.0
            pairs = []
            for _ in range(rounds):
                # In turns: what else the machine does then meets both.
                plain = size / transfer(bare, {}, size)
                used -= processor.seconds(pids)
                pairs.append((size / transfer(gateway.address, headers, size), plain))
                used += processor.seconds(pids)
            yield Throughput(
                name=f"{name}, {size >> 20} MiB",
                baseline_name="a bare aiohttp server",
                rate=max(ours for ours, _ in pairs),
                baseline=max(plain for _, plain in pairs),
                in_turns=statistics.median(ours / plain for ours, plain in pairs),
                processor=used / rounds / (size / 2**30),
                grown=memory.peak(pids) - before,
            )
    gateway.rest("DELETE", f"/sandboxes/{sandbox['sandboxID']}")


def _upload(address: _Address, headers: Mapping[str, str], size: int) -> float:
    fields = {**headers, "Content-Type": "application/octet-stream", "Content-Length": str(size)}
    head = request("POST", "/files?path=large", fields)
    began = time.perf_counter()
    with socket.create_connection(address, timeout=600) as connection:
        connection.sendall(head)
        for _ in range(size // len(_BLOCK)):
            connection.sendall(_BLOCK)
        answer = connection.recv(1 << 16)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"upload answered {answer!r}")
    return time.perf_counter() - began


def _download(address: _Address, headers: Mapping[str, str], size: int) -> float:
    began = time.perf_counter()
    received = drain(address, request("GET", "/files?path=large", headers))
    seconds = time.perf_counter() - began
    if received < size:
        raise RuntimeError(f"{received} bytes came of {size}")
    return seconds


@contextlib.contextmanager
def _bare_server() -> Iterator[_Address]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.bare_server", folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            yield "127.0.0.1", int(process.stdout.readline())
            process.stdin.close()
            process.wait(timeout=30)
