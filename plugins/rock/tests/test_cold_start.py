"""Rules of a cold start, which needs images (K3 to K5, K7), and addresses (K14): two gateways on a real container engine."""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandgate_bundle import make_portable
from sandgate_plugin_docker import enter
from sandgate_testing.containers import Containers, containers_of
from sandgate_testing.engine import docker
from sandgate_testing.gateway import Gateway
from sandgate_testing.images import Images
from sandgate_testing.requirements import lacking, need
from sandgate_testing.sides import Side

pytestmark = [pytest.mark.xdist_group("rock"), pytest.mark.timeout(600)]

SIDES = ["rock", "plain"]


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    need("docker")
    with Images.of_this_run(functools.partial(lacking, "docker")) as images:
        yield images.debian()


@pytest.fixture(scope="module")
def sides(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Side]]:
    """Each started when it is first asked for; images by reference allowed, the template limited to 512 MiB."""
    bundle = make_portable(tmp_path_factory.mktemp("bundle"), entrance=Path(enter.__file__))
    settings = ("allow_images = true", "memory_mb = 512")
    containers = Containers(image=image, bundle=bundle.path.parent, settings=settings)
    made: dict[str, Gateway] = {}

    def side(name: str) -> Side:
        if name not in made:
            options = ("--profile", "rock") if name == "rock" else ()
            made[name] = Gateway(containers=containers, options=options)
            made[name].start()
        return Side(made[name], is_rock=name == "rock")

    try:
        yield side
        for gateway in made.values():
            gateway.stop()
            assert gateway.remains() == []
    finally:
        for gateway in made.values():
            gateway.discard()


@pytest.fixture(params=SIDES)
def side(request: pytest.FixtureRequest, sides: Callable[[str], Side]) -> Side:
    return sides(request.param)


def container(side: Side, made: dict[str, Any]) -> dict[str, Any]:
    """What the engine knows of a sandbox."""
    name = made["metadata"].get("ap-sandbox-id") if side.is_rock and "metadata" in made else None
    name = name or containers_of(side.gateway.state_dir)[made["sandboxID"]]
    found: dict[str, Any] = json.loads(docker("inspect", name).stdout)[0]
    return found


def limits(side: Side, made: dict[str, Any]) -> tuple[int, int]:
    """Whole CPUs (0: all) and MiB, as the engine enforces them."""
    config = container(side, made)["HostConfig"]
    return config["NanoCpus"] // 10**9, config["Memory"] // 2**20


def test_ready_template_has_its_own_resources(side: Side) -> None:
    """K3, K4: what metadata says is not even read."""
    made = side.create(metadata={"cpuCount": "1", "memoryMB": "nonsense"})
    assert limits(side, made) == (0, 512)
    assert side.detail(made)["memoryMB"] == 512
    assert made["templateID"] == "base"


def test_image_is_a_cold_start_with_the_defaults_of_rock(side: Side, image: str) -> None:
    """K3, K4: 2 CPUs and 8192 MiB, where a plain gateway gives what its backend's table says; K1: the text as it was."""
    made = side.create(templateID=image)
    assert made["templateID"] == image
    cpus, memory = limits(side, made)
    # Nothing needs to keep a sandbox from CPUs that its machine does not have.
    all_there_are = int(docker("info", "--format", "{{.NCPU}}").stdout)
    assert (cpus or all_there_are, memory) == ((2, 8192) if side.is_rock else (all_there_are, 512))
    detail = side.detail(made)
    assert (detail["cpuCount"], detail["memoryMB"]) == (cpus or all_there_are, memory)
    assert side.output(made, "id -un; pwd") == "user\n/home/user\n"


def test_cold_start_says_its_resources(side: Side, image: str) -> None:
    """K4, K6"""
    metadata = {"cpuCount": "1", "memoryMB": "256", "startup_timeout": "60.5", "team": "a"}
    made = side.create(templateID=image, metadata=metadata)
    assert limits(side, made) == ((1, 256) if side.is_rock else (0, 512))
    assert metadata.items() <= side.detail(made)["metadata"].items()


def test_more_than_there_is_is_refused(side: Side, image: str) -> None:
    """K4: a positive number is a right one; that nobody has so many CPUs is the backend's to say."""
    answer = side.asked({"templateID": image, "metadata": {"cpuCount": "2000000000"}})
    assert answer.status == (400 if side.is_rock else 201)
    assert not side.is_rock or "CPUs" in answer.json()["message"]


def test_start_that_takes_too_long_is_given_up(side: Side, image: str) -> None:
    """K5: the bound is the client's, and nothing is left (C12)."""
    before = len(containers_of(side.gateway.state_dir))
    answer = side.asked({"templateID": image, "metadata": {"startup_timeout": "0.01"}})
    assert answer.status == (504 if side.is_rock else 201)
    left = len(containers_of(side.gateway.state_dir)) - before
    assert left == (0 if side.is_rock else 1)
    if side.is_rock:
        assert "within 0.01 seconds" in answer.json()["message"]
        # Of a sandbox that is ready nothing of it holds any more.
        made = side.create(templateID=image, metadata={"startup_timeout": "30"})
        assert side.life(made) == 300


def test_container_has_the_name_that_was_asked_for(side: Side) -> None:
    """K7"""
    name = f"asked-{uuid.uuid4().hex[:12]}"
    made = side.create(metadata={"ap-sandbox-id": name})
    names = set(containers_of(side.gateway.state_dir).values())
    assert (name in names) is side.is_rock
    assert side.output(made, "echo here") == "here\n"
    again = side.asked({"metadata": {"ap-sandbox-id": name}})
    assert again.status == (409 if side.is_rock else 201)
    assert side.output(made, "echo still here") == "still here\n"
    assert side.kill(made) == 204
    assert name not in set(containers_of(side.gateway.state_dir).values())
    # It is free again.
    assert side.kill(side.create(metadata={"ap-sandbox-id": name})) == 204


def test_name_that_no_container_can_have_is_refused(side: Side) -> None:
    """K7"""
    names = ("", "a b", "../x", "x" * 200)
    statuses = {side.asked({"metadata": {"ap-sandbox-id": name}}).status for name in names[1:]}
    assert statuses == ({400} if side.is_rock else {201})
    assert side.asked({"metadata": {"ap-sandbox-id": ""}}).status == 201


def test_detail_has_the_address_of_the_container(side: Side) -> None:
    """K14"""
    made = side.create()
    networks = container(side, made)["NetworkSettings"]["Networks"].values()
    shown = side.detail(made)["metadata"].get("e2b.agents.kruise.io/sandbox-ip")
    assert shown == (next(network["IPAddress"] for network in networks) if side.is_rock else None)
