"""Signatures of /files on the vectors of envd.md 6.4 and behaviour 16; S4 to S7."""

import pytest

from sandgate_edge.rest.access import check_signature, signature_of
from sandgate_errors import Unauthenticated

NOW = 1_800_000_000.5


@pytest.mark.parametrize(
    ("path", "operation", "user", "token", "expiration", "signature"),
    [
        ("/x y", "read", "u", "tok123", None, "v1_THvj7JVE/3gKnDPrQNbVsRQUNdvaq4oIemTi0zUvnKk"),
        ("/q", "write", "", "tok123", None, "v1_eO6fhCtEqMzcEysz+J+ZaBcaR6bW63JP8q6EoPZinuI"),
        ("/home/user/a b.txt", "read", "user", "tok123", 1893456000, "v1_MGEksdWUNz0NXpkoYiUM5xY1ivKGh/bH8SLbxt2T3x8"),
        (
            *("hello.txt", "read", "user", "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0", None),
            "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E",
        ),
    ],
)
def test_vectors(path, operation, user, token, expiration, signature):
    query = {"path": path, "username": user, "signature": signature}
    if expiration is not None:
        query["signature_expiration"] = str(expiration)
    assert signature_of(path=path, operation=operation, user=user, token=token, expiration=expiration) == signature
    check_signature(query, token=token, operation=operation, now=NOW)


def signed(expiration=None, **changes):
    signature = signature_of(path="/p", operation="read", user="", token="t", expiration=expiration)
    query = {"path": "/p", "signature": signature}
    if expiration is not None:
        query["signature_expiration"] = str(expiration)
    return {**query, **changes}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"path": "/p"}, "missing signature query parameter"),
        (signed(signature=""), "invalid signature"),
        (signed(signature="v1_é"), "invalid signature"),
        (signed(path="/other"), "invalid signature"),
        (signed(username="root"), "invalid signature"),
        (signed(signature_expiration="1900000000"), "invalid signature"),
        (signed(1_700_000_000, signature_expiration="soon"), "invalid signature"),
        (signed(1_700_000_000, signature_expiration=""), "invalid signature"),
        (signed(1_700_000_000, signature_expiration="9" * 5000), "invalid signature"),
        (signed(1_700_000_000, path="/other"), "invalid signature"),
        (signed(1_700_000_000), "signature is already expired"),
        (signed(-1), "signature is already expired"),
    ],
)
def test_refusals_in_the_order_of_s6(query, message):
    with pytest.raises(Unauthenticated) as caught:
        check_signature(query, token="t", operation="read", now=NOW)
    assert caught.value.message == message


def test_an_operation_and_a_token_open_nothing_else():
    """S11, and read does not allow write."""
    for token, operation in (("t", "write"), ("other", "read")):
        with pytest.raises(Unauthenticated, match="invalid signature"):
            check_signature(signed(), token=token, operation=operation, now=NOW)


def test_a_signature_without_expiry_never_expires():
    check_signature(signed(), token="t", operation="read", now=1e18)
