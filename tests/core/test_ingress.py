"""Rules about requests to a sandbox's ports, checked when it is made (behaviour.md R8, R10, R11)."""

from __future__ import annotations

import pytest

from sandgate_core.ingress import check_ingress
from sandgate_core.records import NetworkRules
from sandgate_core.tokens import Tokens
from sandgate_errors import InvalidArgument


@pytest.mark.parametrize(
    "mask",
    ["", "localhost", "localhost:${PORT}", "app-${PORT}.example.com:8080", "10.0.0.1", "[::1]:${PORT}", "A_b.test"],
)
def test_mask_that_can_be_a_host_is_taken(mask: str) -> None:
    check_ingress(NetworkRules(mask_request_host=mask), secure=False)


@pytest.mark.parametrize(
    "mask",
    [
        *(
            "a b",
            "a/b",
            "http://a",
            "a:b",
            "-a",
            "a-",
            "a..b",
            ".",
            ":80",
            "${port}",
            "$PORT",
            "${PORT",
            "a@b",
            "ä.test",
        ),
        *("a\r\nX: 1", "a\n", "a\0", "a" * 64, "a." * 130 + "a", "x:${PORT}${PORT}"),
    ],
)
def test_mask_that_no_host_can_be_is_refused(mask: str) -> None:
    with pytest.raises(InvalidArgument, match="maskRequestHost"):
        check_ingress(NetworkRules(mask_request_host=mask), secure=True)


def test_private_ports_need_a_secured_sandbox() -> None:
    rules = NetworkRules(allow_public_traffic=False)
    check_ingress(rules, secure=True)
    with pytest.raises(InvalidArgument, match="secured"):
        check_ingress(rules, secure=False)


def test_token_of_the_ports_opens_nothing_else() -> None:
    tokens = Tokens(b"seed" * 8)
    found = {
        tokens.token_of("ione", version=1),
        tokens.traffic_token_of("ione", version=1),
        tokens.traffic_token_of("itwo", version=1),
        tokens.traffic_token_of("ione", version=2),
    }
    assert len(found) == 4
