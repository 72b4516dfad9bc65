"""The whole gateway on PostgreSQL: the way through it, a restart, and that a second gateway keeps out."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sandgate_testing.gateway import Gateway
from sandgate_testing.postgres import PostgresServer
from sandgate_testing.requirements import need


@pytest.fixture
async def database() -> AsyncIterator[str]:
    need("postgres")
    with PostgresServer.running() as server:
        yield await server.new_database()


async def test_gateway_keeps_its_sandboxes_in_postgresql_and_a_second_one_out(
    database: str, make_gateway: Callable[..., Gateway], tmp_path: Path
) -> None:
    gateway = make_gateway(on_exit="keep", options=("--database", database))
    gateway.start()
    name = gateway.create_sandbox()["sandboxID"]
    second = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "sandgate", "serve", "--port", "0", "--isolation", "none",
         "--state-dir", str(tmp_path / "second"), "--database", database],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert second.returncode == 1
    assert "another core uses this database" in second.stderr
    gateway.stop()
    gateway.start()
    listed = gateway.rest("GET", "/v2/sandboxes").json()
    assert [sandbox["sandboxID"] for sandbox in listed] == [name]
    assert not (gateway.state_dir / "sandgate.db").exists()
    assert gateway.rest("DELETE", f"/sandboxes/{name}").status == 204
    gateway.stop()
    assert gateway.remains() == []
