"""Throughput of a command's output, read by a client that does nothing but read.

Both codecs: JSON carries bytes as base64 and so a third more of them; the rate counts the command's own bytes.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any

from bench import memory
from bench.report import Throughput
from sandgate_api.envd.v1 import process_pb2
from sandgate_testing.gateway import Gateway
from sandgate_testing.leftovers import processes_of
from sandgate_testing.raw_http import drain, envelope, request

__all__ = ["output"]


def output(gateway: Gateway, *, size: int, rounds: int) -> Iterator[Throughput]:
    """``size`` bytes of a command's standard output."""
    sandbox = gateway.create_sandbox(timeout=3600)
    plain = max(_rate(size, _plain_pipe(size)) for _ in range(rounds))
    message = process_pb2.StartRequest(
        process=process_pb2.ProcessConfig(cmd="/usr/bin/head", args=["-c", str(size), "/dev/zero"]), stdin=False
    )
    json_message = {
        "process": {"cmd": "/usr/bin/head", "args": ["-c", str(size), "/dev/zero"]},
        "stdin": False,
    }
    for codec, body in (("json", envelope(json_message)), ("proto", envelope(message.SerializeToString()))):
        pids = list(processes_of(gateway.state_dir))
        memory.forget_peaks(pids)
        before = memory.peak(pids)
        rate = max(_rate(size, _through(gateway, sandbox, codec=codec, body=body, size=size)) for _ in range(rounds))
        yield Throughput(
            name=f"stdout, {codec}",
            baseline_name="a pipe",
            rate=rate,
            baseline=plain,
            grown=memory.peak(pids) - before,
        )
    gateway.rest("DELETE", f"/sandboxes/{sandbox['sandboxID']}")


def _through(gateway: Gateway, sandbox: dict[str, Any], *, codec: str, body: bytes, size: int) -> float:
    headers = {
        "E2b-Sandbox-Id": sandbox["sandboxID"],
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": sandbox["envdAccessToken"],
        "Content-Type": f"application/connect+{codec}",
    }
    began = time.perf_counter()
    received = drain(gateway.address, request("POST", "/process.Process/Start", headers, body=body))
    seconds = time.perf_counter() - began
    if received < size:
        raise RuntimeError(f"{received} bytes came for {size} of output")
    return seconds


def _plain_pipe(size: int) -> float:
    began = time.perf_counter()
    with subprocess.Popen(
        ["/usr/bin/head", "-c", str(size), "/dev/zero"], stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdout is not None
        while process.stdout.read(1 << 16):
            pass
    return time.perf_counter() - began


def _rate(size: int, seconds: float) -> float:
    return size / seconds
