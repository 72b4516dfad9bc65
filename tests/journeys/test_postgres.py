"""The whole gateway on PostgreSQL: the way through it, and a restart. Several on one: ``test_two_gateways.py``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from sandgate_testing.gateway import Gateway
from sandgate_testing.postgres import PostgresServer
from sandgate_testing.requirements import need


@pytest.fixture
async def database() -> AsyncIterator[str]:
    need("postgres")
    with PostgresServer.running() as server:
        yield await server.new_database()


async def test_gateway_keeps_its_sandboxes_in_postgresql(database: str, make_gateway: Callable[..., Gateway]) -> None:
    gateway = make_gateway(on_exit="keep", options=("--database", database))
    gateway.start()
    name = gateway.create_sandbox()["sandboxID"]
    gateway.stop()
    gateway.start()
    listed = gateway.rest("GET", "/v2/sandboxes").json()
    assert [sandbox["sandboxID"] for sandbox in listed] == [name]
    assert not (gateway.state_dir / "sandgate.db").exists()
    assert gateway.rest("DELETE", f"/sandboxes/{name}").status == 204
    gateway.stop()
    assert gateway.remains() == []
