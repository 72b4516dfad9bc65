"""A server on Kubernetes, by its literal answers: what it offers is found out, and what takes its time is waited for.

No cluster is needed: the answers are those of server 1.1.1, written out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

import pytest

from sandgate_errors import CapabilityMissing, NotFound, Unavailable
from sandgate_plugin_api import Capability
from sandgate_plugin_opensandbox.fleet import Fleet
from sandgate_plugin_opensandbox.identity import Identity
from sandgate_plugin_opensandbox.pausing import Pausing
from sandgate_plugin_opensandbox.probing import probe
from sandgate_plugin_opensandbox.server import Server
from sandgate_plugin_opensandbox.settings import OpenSandboxSettings, TemplateSettings
from sandgate_plugin_opensandbox.snapshots import Snapshots
from sandgate_plugin_opensandbox.starting import Starter
from sandgate_plugin_opensandbox.tunnels import Tunnels

Answer = tuple[int, object]

NO_LIST: Answer = (200, {"items": [], "pagination": {"hasNextPage": False, "totalItems": 0}})
TWO_OF_ONE_NAME: Answer = (400, {"code": "VOLUME::DUPLICATE_NAME", "message": "sandgate-probe"})
NO_RULES: Answer = (400, {"code": "SANDBOX::INVALID_PARAMETER", "message": "credentialProxy needs dns+nft"})
NOBODY: Answer = (404, {"code": "KUBERNETES::SANDBOX_NOT_FOUND", "message": "not found"})
NO_PAUSE: Answer = (400, {"code": "SANDBOX::INVALID_STATE", "message": "Pause is not supported for this sandbox type"})
NO_SNAPSHOTS: Answer = (501, {"code": "SNAPSHOT::UNSUPPORTED_RUNTIME", "message": "no registry"})
BUSY: Answer = (409, {"code": "SANDBOX::INVALID_STATE", "message": "not running"})


class Script:
    """Answers by the beginnings of method and path, the first that fits: one after the other, the last one for ever."""

    def __init__(self, answers: dict[str, list[Answer]]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.split(" ", 2)
        sizes = [line.partition(":")[2] for line in head.splitlines() if line.lower().startswith("content-length")]
        await reader.readexactly(int(sizes[0]) if sizes else 0)
        asked = f"{method} {target.partition('?')[0]}"
        self.asked.append(asked)
        left = next(answers for known, answers in self.answers.items() if asked.startswith(known))
        status, body = left.pop(0) if len(left) > 1 else left[0]
        content = json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode())
        writer.write(content)
        await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def scripted(answers: dict[str, list[Answer]]) -> AsyncIterator[tuple[Server, OpenSandboxSettings, Script]]:
    script = Script(answers)
    listener = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    async with listener:
        settings = OpenSandboxSettings.read(
            {"server": f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", "api_key": "k"}
        )
        server = Server.connect(settings)
        try:
            yield server, settings, script
        finally:
            await server.close()


@pytest.mark.parametrize(
    ("pause", "snapshots", "offered"),
    [
        (NOBODY, NO_LIST, {Capability.LIMITS, Capability.SNAPSHOT, Capability.PAUSE_FILESYSTEM}),
        (NOBODY, NO_SNAPSHOTS, {Capability.LIMITS, Capability.PAUSE_FILESYSTEM}),
        (NO_PAUSE, NO_LIST, {Capability.LIMITS, Capability.SNAPSHOT}),
        (NO_PAUSE, NO_SNAPSHOTS, {Capability.LIMITS}),
    ],
    ids=["batchsandbox", "without a registry", "agent-sandbox", "agent-sandbox without a registry"],
)
async def test_what_the_cluster_cannot_do_is_found_out_before_the_first_sandbox(pause, snapshots, offered):
    async with scripted(
        {
            "GET /health": [(200, {})],
            "GET /version": [(200, {"version": "1.1.1"})],
            "GET /v1/snapshots": [snapshots],
            "GET /v1/sandboxes": [NO_LIST],
            "POST /v1/sandboxes/": [pause],
            "POST /v1/sandboxes": [TWO_OF_ONE_NAME, NO_RULES],
        }
    ) as (server, settings, _):
        found = await probe(server, settings)
    assert (found.runtime, found.freezes) == ("kubernetes", False)
    assert found.capabilities == offered


def sandbox(state: str) -> Answer:
    return 200, {"id": "pod", "status": {"state": state}}


HANDLE = {"gateway": "g", "sandbox": "i1", "id": "pod", "template": "base", "cpu_count": 1, "memory_mb": 64}


@pytest.fixture
def pausing(tmp_path) -> Callable[..., Pausing]:
    def make(server: Server, settings: OpenSandboxSettings) -> Pausing:
        tunnels = Tunnels(server.session, tmp_path)
        identity = Identity.of(settings, tmp_path)
        # Nothing is started here, so there is no bundle.
        starter = Starter(server, identity, settings, bundle=None, archive=None, tunnels=tunnels)
        fleet = Fleet(server, starter, "g", lifetime=600, rules=False)
        return Pausing(
            server,
            fleet,
            starter,
            Snapshots(server, "g"),
            freezes=False,
            capabilities=frozenset({Capability.PAUSE_FILESYSTEM}),
            remake=None,
            template=lambda handle: TemplateSettings(image="x"),
        )

    return make


async def test_pause_that_takes_its_time_is_waited_for(pausing):
    async with scripted(
        {
            "GET /v1/sandboxes/pod": [sandbox(state) for state in ("Running", "Running", "Pausing", "Paused")],
            "POST /v1/sandboxes/pod/pause": [(202, {})],
        }
    ) as (server, settings, script):
        handle = await pausing(server, settings).pause(HANDLE, memory=False)
    assert handle == {**HANDLE, "paused": "files"}
    assert script.asked.count("POST /v1/sandboxes/pod/pause") == 1
    assert script.asked.count("GET /v1/sandboxes/pod") == 4


async def test_pause_may_be_repeated_for_one_that_is_paused_already(pausing):
    async with scripted({"GET /v1/sandboxes/pod": [sandbox("Paused")], "POST /v1/sandboxes/pod/pause": [BUSY]}) as (
        server,
        settings,
        _,
    ):
        assert (await pausing(server, settings).pause({**HANDLE, "paused": "files"}, memory=False))["paused"] == "files"


@pytest.mark.parametrize(
    ("states", "answer", "error"),
    [
        (["Running", "Failed"], (202, {}), NotFound),
        (["Running", "Unknown"], (202, {}), Unavailable),
        (["Running"], NO_PAUSE, CapabilityMissing),
        (["Terminated"], BUSY, NotFound),
    ],
    ids=["it ended meanwhile", "nobody knows", "it cannot", "it has ended"],
)
async def test_pause_that_came_to_nothing_is_told(pausing, states, answer, error):
    async with scripted(
        {"GET /v1/sandboxes/pod": [sandbox(state) for state in states], "POST /v1/sandboxes/pod/pause": [answer]}
    ) as (server, settings, _):
        with pytest.raises(error):
            await pausing(server, settings).pause(HANDLE, memory=False)


async def test_memory_is_not_said_to_be_kept(pausing):
    async with scripted({}) as (server, settings, script):
        with pytest.raises(CapabilityMissing, match="opensandbox"):
            await pausing(server, settings).pause(HANDLE, memory=True)
    assert script.asked == []
