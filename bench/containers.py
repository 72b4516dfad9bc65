"""Sandboxes on a container engine next to what the same engine does plainly, and next to the process backend.

Gateways of their own, on the engine of this machine and with an image that is made for it; where there is none, one line
says why nothing is measured.
"""

from __future__ import annotations

import functools
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from e2b import Sandbox

from bench.report import Latency
from sandgate_bundle import make_portable
from sandgate_plugin_docker import enter
from sandgate_testing.containers import Containers
from sandgate_testing.engine import docker, why_no_engine
from sandgate_testing.gateway import Gateway, wait_until
from sandgate_testing.images import ImageFailed, Images

__all__ = ["NotMeasured", "containers"]

_Value = TypeVar("_Value")

_WARM_UP = 3
_WARM = 2
_AT_ONCE = 20
_DETACHED = "docker run -d of its image"


class NotMeasured(Exception):
    """Why not, in one line."""


def containers(process: Gateway, *, rounds: int) -> Iterator[Latency]:
    """Rows one by one; ``process`` is a gateway that runs on the process backend. Raises NotMeasured."""
    if (reason := why_no_engine()) is not None:
        raise NotMeasured(reason)
    with Images.of_this_run() as images, tempfile.TemporaryDirectory(prefix="sandgate-bench-") as folder:
        try:
            image = images.debian()
        except ImageFailed as error:
            raise NotMeasured(str(error)) from None
        bundle = make_portable(Path(folder), entrance=Path(enter.__file__)).path.parent
        few = max(5, rounds // 8)
        with _gateway(Containers(image=image, bundle=bundle)) as gateway:
            yield from _cold(gateway, image, rounds=few)
            yield _commands(gateway, process, rounds=rounds)
            yield _at_once(gateway, image, rounds=3)
        with _gateway(Containers(image=image, bundle=bundle, settings=[f"warm = {_WARM}"])) as gateway:
            yield _warm(gateway, image, rounds=few)


@contextmanager
def _gateway(setup: Containers) -> Iterator[Gateway]:
    gateway = Gateway(containers=setup)
    try:
        gateway.start()
        yield gateway
        gateway.stop()
    finally:
        gateway.discard()


def _cold(gateway: Gateway, image: str, *, rounds: int) -> Iterator[Latency]:
    """Next to the plain command, which has the image's program run to its end, and to the half of it that only starts one."""
    ours, attached, detached = [], [], []
    for _ in range(_WARM_UP + rounds):
        ours.append(_create(gateway))
        attached.append(_run_to_its_end(image))
        detached.append(_run_plainly(image))
    for baseline_name, baseline in (("docker run IMAGE true", attached), (_DETACHED, detached)):
        yield Latency(
            name="Sandbox.create, container",
            baseline_name=baseline_name,
            rounds=ours[_WARM_UP:],
            baseline=baseline[_WARM_UP:],
        )


def _warm(gateway: Gateway, image: str, *, rounds: int) -> Latency:
    """Each from a full pool, as a gateway is that is not asked all the time."""
    ours, plain = [], []
    for _ in range(_WARM_UP + rounds):
        wait_until(lambda: len(gateway.boxes()) == _WARM)
        # Named before it is ready.
        time.sleep(0.5)
        ours.append(_create(gateway))
        plain.append(_run_plainly(image))
    return Latency(
        name="Sandbox.create, warm container",
        baseline_name=_DETACHED,
        rounds=ours[_WARM_UP:],
        baseline=plain[_WARM_UP:],
    )


def _commands(gateway: Gateway, process: Gateway, *, rounds: int) -> Latency:
    """With one profile for both: what the image's own makes every login shell start would be measured with it."""
    boxes = [Sandbox.create(timeout=3600, **each.sdk_options) for each in (gateway, process)]
    boxes[0].files.write("/etc/profile", boxes[1].files.read("/etc/profile"), user="root")
    ours: list[float] = []
    plain: list[float] = []
    for _ in range(_WARM_UP + rounds):
        for box, times in zip(boxes, (ours, plain), strict=True):
            times.append(_timed(functools.partial(box.commands.run, "true"))[1])
    for box in boxes:
        box.kill()
    return Latency(
        name="commands.run('true'), container",
        baseline_name="the same on the process backend",
        rounds=ours[_WARM_UP:],
        baseline=plain[_WARM_UP:],
    )


def _at_once(gateway: Gateway, image: str, *, rounds: int) -> Latency:
    """Until all are there. One that fails ends the measurement."""
    ours, plain = [], []
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for _ in range(rounds):
            boxes, seconds = _timed(lambda: _all(threads, [lambda: Sandbox.create(**gateway.sdk_options)] * _AT_ONCE))
            ours.append(seconds)
            _all(threads, [box.kill for box in boxes])
            names, seconds = _timed(lambda: _all(threads, [lambda: _start_plainly(image)] * _AT_ONCE))
            plain.append(seconds)
            docker("rm", "-f", *names)
    return Latency(
        name=f"{_AT_ONCE} creates at once, container",
        baseline_name=f"{_AT_ONCE} docker run at once",
        rounds=ours,
        baseline=plain,
    )


def _all(threads: ThreadPoolExecutor, calls: Sequence[Callable[[], _Value]]) -> list[_Value]:
    return [running.result() for running in [threads.submit(call) for call in calls]]


def _create(gateway: Gateway) -> float:
    box, seconds = _timed(lambda: Sandbox.create(**gateway.sdk_options))
    box.kill()
    return seconds


def _run_plainly(image: str) -> float:
    name, seconds = _timed(lambda: _start_plainly(image))
    docker("rm", "-f", name)
    return seconds


def _run_to_its_end(image: str) -> float:
    name = f"sandgate-bench-{secrets.token_hex(6)}"
    _, seconds = _timed(lambda: docker("run", "--name", name, image, "true"))
    docker("rm", "-f", name)
    return seconds


def _start_plainly(image: str) -> str:
    """Returns once it runs."""
    started = subprocess.run(["docker", "run", "-d", image, "sleep", "600"], check=True, capture_output=True, text=True)
    return started.stdout.strip()


def _timed(call: Callable[[], _Value]) -> tuple[_Value, float]:
    began = time.perf_counter()
    value = call()
    return value, time.perf_counter() - began
