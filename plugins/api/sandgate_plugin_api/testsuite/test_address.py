"""The address that a sandbox has for itself alone, where a backend tells one."""

from __future__ import annotations

import ipaddress

import pytest

from sandgate_errors import NotFound
from sandgate_plugin_api.backend import Backend, Capability
from sandgate_plugin_api.records import Egress
from sandgate_plugin_api.testsuite.box import Box, made
from sandgate_plugin_api.testsuite.deployment import Deployment

pytestmark = pytest.mark.asyncio


async def _address(box: Box) -> str:
    address = await box.backend.address(box.handle)
    if address is None:
        pytest.skip("it tells no addresses")
    return address


async def test_address_is_one_that_the_sandbox_has(box: Box) -> None:
    address = ipaddress.ip_address(await _address(box))
    assert not address.is_loopback, "loopback is every sandbox's"
    shown = {4: f"grep -qF '{address}' /proc/net/fib_trie", 6: f"grep -qiF '{_plain(address)}' /proc/net/if_inet6"}
    done = await box.run(shown[address.version])
    assert done.exit_code == 0, f"{address} is no address of the sandbox"


def _plain(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    """As the kernel lists those of IPv6."""
    return address.exploded.replace(":", "")


async def test_no_two_sandboxes_have_one_address(box: Box, deployment: Deployment) -> None:
    first = await _address(box)
    async with made(deployment, box.backend) as other:
        assert await _address(other) != first


async def test_sandbox_that_is_on_no_network_has_no_address(deployment: Deployment, backend: Backend) -> None:
    if Capability.NO_INTERNET not in backend.capabilities:
        pytest.skip("it cannot be switched off")
    async with made(deployment, backend, allow_internet_access=False, egress=Egress(internet=False)) as box:
        address = await backend.address(box.handle)
        if address is not None:
            # Rules may keep it from the world and leave it its network.
            assert (await box.run(f"grep -qF '{address}' /proc/net/fib_trie /proc/net/if_inet6")).exit_code == 0


async def test_sandbox_that_is_gone_has_no_address(deployment: Deployment, backend: Backend) -> None:
    async with made(deployment, backend) as box:
        handle = box.handle
    try:
        address = await backend.address(handle)
    except NotFound:
        return
    assert address is None
