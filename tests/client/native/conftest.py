"""The native client in both its forms, on a real gateway: one test text for the blocking and the asynchronous one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from sandgate import AsyncSandbox, Sandbox
from sandgate_testing.cutting_proxy import CuttingProxy
from sandgate_testing.either import done
from sandgate_testing.gateway import Gateway


@pytest.fixture(params=[Sandbox, AsyncSandbox], ids=["blocking", "async"])
def kind(request) -> Any:
    return request.param


@pytest.fixture
async def sandbox(kind: Any, gateway: Gateway) -> AsyncIterator[Any]:
    box = await done(kind.create(state_dir=gateway.state_dir))
    yield box
    await done(box.kill())
    await done(box.close())


@pytest.fixture
def open_gateway(
    make_gateway: Callable[..., Gateway], reserve_port: Callable[[], int]
) -> Iterator[tuple[Gateway, int]]:
    """A gateway of the test's own whose core listens on a port, and that port."""
    port = reserve_port()
    gateway = make_gateway(options=("--grpc-listen", str(port)))
    gateway.start()
    yield gateway, port
    gateway.stop()
    assert gateway.remains() == []


@pytest.fixture
def proxy(open_gateway: tuple[Gateway, int]) -> Iterator[CuttingProxy]:
    with CuttingProxy(("127.0.0.1", open_gateway[1])) as proxy:
        yield proxy
