"""The listening socket, and what is said when there is none."""

from __future__ import annotations

import contextlib
import socket

import pytest

from sandgate import listening
from sandgate_errors import FailedPrecondition


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_port_zero_prints_the_real_port():
    with contextlib.closing(listening.bind("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        assert listening.url_of("127.0.0.1", listener) == f"http://127.0.0.1:{port}"
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            pass


def test_a_taken_port_is_said_in_one_line():
    with contextlib.closing(listening.bind("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(FailedPrecondition) as caught:
            listening.bind("127.0.0.1", port)
    expected = f"port {port} on 127.0.0.1 is in use (by another gateway?): choose another with --port"
    assert caught.value.message == expected


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "x" * 300, ".", "a..b"])
def test_an_address_that_is_not_ours_is_named(host):
    with pytest.raises(FailedPrecondition, match="--host"):
        listening.bind(host, 0)


def test_everywhere_is_shown_as_loopback():
    with contextlib.closing(listening.bind("0.0.0.0", 0)) as listener:
        assert listening.url_of("0.0.0.0", listener).startswith("http://127.0.0.1:")


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here")
def test_ipv6_addresses_stand_in_brackets_and_everywhere_includes_ipv4():
    with contextlib.closing(listening.bind("::1", 0)) as listener:
        assert listening.url_of("::1", listener).startswith("http://[::1]:")
    with contextlib.closing(listening.bind("::", 0)) as listener:
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=10).close()
