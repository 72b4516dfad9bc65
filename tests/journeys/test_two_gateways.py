"""Two gateways on one PostgreSQL, used through the SDK: any answers for all, and what becomes of a core that dies or stands still.

Both run on this machine, as they would on two: what one core has on its host (backend ``process``) the other reaches by its
relay only. The backend ``roaming`` is the process backend on a folder that both see; its sandboxes are bound to no host. With
``--backend opensandbox`` the gateways have one OpenSandbox server between them, as replicas on a cluster have.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]
import pytest
from e2b import Sandbox

from sandgate_testing.containers import Containers
from sandgate_testing.gateway import Answer, Gateway, wait_until
from sandgate_testing.leftovers import processes_of
from sandgate_testing.opensandbox import OnServer, OpenSandboxServer
from sandgate_testing.postgres import PostgresServer
from sandgate_testing.requirements import need

#: Seconds of a lease; what waits for its end takes a little longer.
LEASE = 3
PLUGIN = """
from dataclasses import replace
from pathlib import Path
from sandgate_plugin_api import hookimpl
from sandgate_plugin_process.backend import ProcessBackend

class Roaming(ProcessBackend):
    name = "roaming"
    host_bound = False
    def __init__(self, context):
        settings = dict(context.settings)
        shared = Path(settings.pop("shared"))
        super().__init__(replace(context, state_dir=shared / "s", runtime_dir=shared / "r", settings=settings))
    async def open(self):
        await super().open()
        self._template = replace(self._template, id="roaming")

@hookimpl
def sandgate_register_backends(registrar): registrar.add(Roaming)
"""


@pytest.fixture(autouse=True)
def backend_of_the_test(request: pytest.FixtureRequest) -> None:
    """Before anything is started for it."""
    backend = request.config.getoption("--backend") or "process"
    if "pair" in request.fixturenames and backend != "process":
        pytest.skip("its sandboxes are the process backend's")
    if "replicas" in request.fixturenames and backend != "opensandbox":
        pytest.skip("for gateways on an OpenSandbox server: --backend opensandbox")


@pytest.fixture
async def database() -> AsyncIterator[str]:
    need("postgres")
    with PostgresServer.running() as server:
        yield await server.new_database()


@pytest.fixture
def shared() -> Iterator[Path]:
    """What both hosts of ``roaming`` see; short, for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="sgr-"))
    for name in "sr":
        (folder / name).mkdir(mode=0o700)
    yield folder
    for pid in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):  # it ended with its parent
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def pair(
    database: str,
    shared: Path,
    isolation: str,
    make_gateway: Callable[..., Gateway],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Gateway, Gateway]:
    """Two gateways that serve, with one key, seed and database."""
    (tmp_path / "roaming_plugin.py").write_text(PLUGIN)
    info = tmp_path / "roaming-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: roaming\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sandgate.plugins]\nroaming = roaming_plugin\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    configuration = tmp_path / "sandgate.toml"
    configuration.write_text(
        f'[backends.process]\nwarm = 0\n[backends.roaming]\nshared = "{shared}"\nwarm = 0\nisolation = "{isolation}"\n'
    )
    options = ("--config", str(configuration), "--database", database, "--core-lease", str(LEASE))
    seed = secrets.token_hex(32)
    first, second = (make_gateway(on_exit="keep", options=options, seed=seed) for _ in range(2))
    first.start()
    second.api_key = first.api_key
    second.start()
    return first, second


@pytest.fixture
def replicas(database: str, containers: Containers | None) -> Iterator[tuple[Gateway, Gateway, OpenSandboxServer]]:
    """Two gateways of one name on one server; nothing else is shared but key, seed and database."""
    assert isinstance(containers, OnServer)
    both = replace(containers, settings=('gateway = "replicas"',))
    options, seed = ("--database", database, "--core-lease", str(LEASE)), secrets.token_hex(32)
    first, second = (
        Gateway(isolation="container", containers=both, on_exit="keep", options=options, seed=seed) for _ in range(2)
    )
    try:
        first.start()
        second.api_key = first.api_key
        second.start()
        yield first, second, containers.server
    finally:
        for gateway in (first, second):
            gateway.discard()


@pytest.fixture
def history(database: str) -> Callable[[str], list[str]]:
    """The states that a sandbox went through."""

    async def read(sandbox_id: str) -> list[str]:
        connection = await asyncpg.connect(database)
        try:
            query = "SELECT to_state FROM transitions WHERE sandbox_id = $1 ORDER BY revision"
            return [row["to_state"] for row in await connection.fetch(query, sandbox_id)]
        finally:
            await connection.close()

    def found(sandbox_id: str) -> list[str]:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, read(sandbox_id)).result()

    return found


def finish(gateways: tuple[Gateway, ...]) -> None:
    """Kill what is left by the first, stop all; nothing of them stays."""
    for sandbox in gateways[0].rest("GET", "/v2/sandboxes").json():
        assert gateways[0].rest("DELETE", f"/sandboxes/{sandbox['sandboxID']}").status == 204
    for gateway in gateways:
        gateway.stop()
        assert gateway.remains() == []
        assert "Traceback" not in gateway.log(), gateway.log()


def crash(gateway: Gateway) -> None:
    """All of it at once, as when its host loses power; its sandboxes stay."""
    core = gateway.child("sandgate_core")
    assert core is not None
    os.kill(gateway.pid, signal.SIGSTOP)  # it would start the core again
    os.kill(core, signal.SIGKILL)
    gateway.stop(hard=True)


def answered(ask: Callable[[], Answer]) -> Answer:
    """The first answer that is not "come back later"."""

    def once() -> Answer | None:
        answer = ask()
        return None if answer.status == 503 else answer

    return wait_until(once)


def test_one_sandbox_is_used_by_way_of_both(pair: tuple[Gateway, Gateway]) -> None:
    first, second = pair
    here = Sandbox.create(timeout=120, **first.sdk_options)
    there = Sandbox.connect(here.sandbox_id, **second.sdk_options)
    for sandbox, other in ((here, there), (there, here)):
        sandbox.files.write("shared.txt", "x" * 300_000)
        assert other.files.read("shared.txt") == "x" * 300_000
        assert other.commands.run("wc -c < shared.txt").stdout.strip() == "300000"
    background = there.commands.run("read line; echo got $line; sleep 60", background=True, stdin=True)
    here.commands.send_stdin(background.pid, "hello\n")
    assert next(iter(background))[0] == "got hello\n"
    assert [process.pid for process in here.commands.list()] == [background.pid]
    assert background.kill()
    there.pause()
    assert here.get_info().state == "paused"
    assert Sandbox.connect(here.sandbox_id, **first.sdk_options).commands.run("cat shared.txt | wc -c").exit_code == 0
    for gateway in pair:
        assert [item["sandboxID"] for item in gateway.rest("GET", "/v2/sandboxes").json()] == [here.sandbox_id]
        assert gateway.call("GET", "/ready", headers={}).status == 200
    assert there.kill()
    assert not here.is_running()
    finish(pair)


def test_crashed_core_is_waited_for_on_its_host_and_taken_over_elsewhere(
    pair: tuple[Gateway, Gateway], history: Callable[[str], list[str]]
) -> None:
    first, second = pair
    bound = first.create_sandbox(timeout=300)["sandboxID"]
    roaming = Sandbox.create("roaming", timeout=300, **first.sdk_options)
    short = first.create_sandbox(templateID="roaming", timeout=LEASE + 2)["sandboxID"]
    roaming.files.write("f", "kept")
    running = roaming.commands.run("sleep 600", background=True)
    crash(first)
    # Taken over: processes, files and deadlines go on.
    assert (
        answered(lambda: second.rest("POST", f"/sandboxes/{roaming.sandbox_id}/timeout", {"timeout": 250})).status
        == 204
    )
    again = Sandbox.connect(roaming.sandbox_id, **second.sdk_options)
    assert again.files.read("f") == "kept"
    assert [process.pid for process in again.commands.list()] == [running.pid]
    wait_until(lambda: history(short)[-1] == "killed")
    assert history(short) == ["creating", "running", "killing", "killed"]
    # On the dead core's host: shown, and out of reach with a reason.
    assert second.rest("GET", f"/sandboxes/{bound}").status == 200
    refused = second.rest("DELETE", f"/sandboxes/{bound}")
    assert (refused.status, "is away" in refused.json()["message"]) == (503, True)
    assert int(refused.headers["retry-after"]) > 0
    # Started again on its state directory, it is the same core and has its sandbox; what was taken stays taken.
    first.start()
    assert answered(lambda: second.rest("POST", f"/sandboxes/{bound}/timeout", {"timeout": 200})).status == 204
    assert Sandbox.connect(bound, **second.sdk_options).commands.run("echo back").stdout == "back\n"
    assert Sandbox.connect(roaming.sandbox_id, **first.sdk_options).files.read("f") == "kept"
    assert history(bound)[:2] == ["creating", "running"]
    finish((second, first))


def test_core_that_stood_still_beyond_its_lease_does_nothing_twice(
    pair: tuple[Gateway, Gateway], history: Callable[[str], list[str]]
) -> None:
    first, second = pair
    bound = first.create_sandbox(timeout=300)["sandboxID"]
    roaming = first.create_sandbox(templateID="roaming", timeout=300)["sandboxID"]
    short = first.create_sandbox(templateID="roaming", timeout=LEASE + 2, autoPause=False)["sandboxID"]
    core = first.child("sandgate_core")
    assert core is not None
    os.kill(core, signal.SIGSTOP)
    try:
        began = time.monotonic()
        refused = second.rest("POST", f"/sandboxes/{bound}/timeout", {"timeout": 100})
        assert refused.status == 503
        assert time.monotonic() - began < 60
        taken = answered(lambda: second.rest("POST", f"/sandboxes/{roaming}/timeout", {"timeout": 250}))
        assert taken.status == 204
        wait_until(lambda: history(short)[-1] == "killed")
        assert second.rest("DELETE", f"/sandboxes/{roaming}").status == 204
    finally:
        os.kill(core, signal.SIGCONT)
    assert answered(lambda: first.rest("POST", f"/sandboxes/{bound}/timeout", {"timeout": 100})).status == 204
    assert first.child("sandgate_core") == core
    for ended in (short, roaming):
        assert first.rest("GET", f"/sandboxes/{ended}").status == 404
        assert first.rest("DELETE", f"/sandboxes/{ended}").status == 404
        assert history(ended) == ["creating", "running", "killing", "killed"]
    finish(pair)


def test_many_at_once_on_both_end_in_one_defined_state(
    pair: tuple[Gateway, Gateway], history: Callable[[str], list[str]]
) -> None:
    """C35 to C37, C59; rest.md 1.4"""
    with ThreadPoolExecutor(12) as threads:

        def create(number: int) -> Answer:
            headers = {"X-API-Key": pair[0].api_key, "Idempotency-Key": "one-for-all"}
            return pair[number % 2].rest("POST", "/v2/sandboxes", {"templateID": "base"}, headers=headers)

        answers = list(threads.map(create, range(12)))
        made = {answer.json()["sandboxID"] for answer in answers if answer.status == 201}
        assert len(made) == 1
        assert {answer.status for answer in answers} <= {201, 409}
        (name,) = made

        def storm(number: int) -> int:
            path, body = (("pause", {}), ("connect", {"timeout": 60}))[number // 2 % 2]
            return pair[number % 2].rest("POST", f"/sandboxes/{name}/{path}", body).status

        assert set(threads.map(storm, range(24))) <= {200, 201, 204, 409}
        assert history(name)[-1] in {"running", "paused"}

        def end(number: int) -> int:
            return storm(number) if number % 3 else pair[number % 2].rest("DELETE", f"/sandboxes/{name}").status

        list(threads.map(end, range(18)))
    for gateway in pair:
        assert gateway.rest("GET", f"/sandboxes/{name}").status == 404
    assert history(name).count("killed") == 1
    finish(pair)


def test_gateway_with_another_seed_is_refused(
    pair: tuple[Gateway, Gateway], database: str, make_gateway: Callable[..., Gateway]
) -> None:
    third = make_gateway(on_exit="keep", options=("--database", database))
    third.api_key = pair[0].api_key
    with pytest.raises(Exception, match="same SANDGATE_SEED"):
        third.start()
    finish(pair)


def names_on(server: OpenSandboxServer) -> set[str]:
    """The sandboxes of these gateways that the server has."""
    found = (each["metadata"] for each in server.sandboxes())
    return {about["sandgate-sandbox"] for about in found if about["sandgate-gateway"] == "replicas"}


def test_sandboxes_on_a_cluster_outlive_their_gateway(
    replicas: tuple[Gateway, Gateway, OpenSandboxServer], history: Callable[[str], list[str]]
) -> None:
    """The whole first machine is gone: what it had on the cluster goes on with the second one, and nothing happens twice."""
    first, second, server = replicas
    running = Sandbox.create(timeout=300, **first.sdk_options)
    running.files.write("f", "kept")
    command = running.commands.run("sleep 600", background=True)
    paused = Sandbox.create(timeout=300, **first.sdk_options)
    paused.files.write("f", "asleep")
    paused.pause()
    keyed = {"X-API-Key": first.api_key, "Idempotency-Key": "made-once"}
    body = {"templateID": "base", "timeout": 300}
    once = first.rest("POST", "/v2/sandboxes", body, headers=keyed).json()["sandboxID"]
    short = first.create_sandbox(timeout=LEASE + 2)["sandboxID"]
    crash(first)
    # Taken over: processes, files, pauses, deadlines, and what a key stands for.
    path = f"/sandboxes/{running.sandbox_id}/timeout"
    assert answered(lambda: second.rest("POST", path, {"timeout": 250})).status == 204
    again = Sandbox.connect(running.sandbox_id, **second.sdk_options)
    assert again.files.read("f") == "kept"
    assert [process.pid for process in again.commands.list()] == [command.pid]
    assert second.rest("GET", f"/sandboxes/{paused.sandbox_id}").json()["state"] == "paused"
    assert Sandbox.connect(paused.sandbox_id, **second.sdk_options).files.read("f") == "asleep"
    repeated = second.rest("POST", "/v2/sandboxes", body, headers=keyed)
    assert (repeated.status, repeated.json()["sandboxID"]) == (201, once)
    wait_until(lambda: history(short)[-1] == "killed")
    assert history(short) == ["creating", "running", "killing", "killed"]
    kept = {running.sandbox_id, paused.sandbox_id, once}
    wait_until(lambda: names_on(server) == kept)
    # Back again, it takes nothing for lost or its own, and serves them by way of the other.
    first.start()
    assert {item["sandboxID"] for item in first.rest("GET", "/v2/sandboxes").json()} == kept
    assert Sandbox.connect(running.sandbox_id, **first.sdk_options).commands.run("cat f").stdout == "kept"
    assert names_on(server) == kept
    assert again.kill()
    assert history(running.sandbox_id)[:2] == ["creating", "running"]
    assert history(running.sandbox_id).count("killed") == 1
    finish((second, first))
    assert names_on(server) == set()


def test_create_on_a_cluster_that_its_gateway_did_not_survive_leaves_nothing(
    replicas: tuple[Gateway, Gateway, OpenSandboxServer],
) -> None:
    first, second, server = replicas
    with ThreadPoolExecutor(1) as thread:
        creating = thread.submit(first.rest, "POST", "/v2/sandboxes", {"templateID": "base", "timeout": 300})
        # The server has it, and nobody has been told.
        wait_until(lambda: names_on(server))
        assert not creating.done()
        crash(first)
        with contextlib.suppress(OSError, http.client.HTTPException):
            creating.result()
    wait_until(lambda: second.rest("GET", "/v2/sandboxes").json() == [] and not names_on(server))
    finish((second,))
    first.start()
    assert first.rest("GET", "/v2/sandboxes").json() == []
    finish((first,))
