"""Headers that ask for time (behaviour T1, T4, T5, O14)."""

from __future__ import annotations

import pytest

from sandgate_edge.connect.deadline import keepalive_seconds, passed_on, timeout_ms
from sandgate_errors import InvalidArgument


@pytest.mark.parametrize(
    ("header", "expected"),
    [(None, None), ("0", None), ("000", None), ("1", 1), ("60000", 60000), ("9999999999", 9999999999)],
)
def test_time_limit_is_whole_milliseconds_and_zero_is_none(header, expected):
    assert timeout_ms(header) == expected


@pytest.mark.parametrize("header", ["", " ", "-1", "+1", "1.5", "1e3", "abc", "12345678901", "１２", "1_0"])
def test_any_other_time_limit_is_invalid(header):
    with pytest.raises(InvalidArgument, match="Connect-Timeout-Ms"):
        timeout_ms(header)
    # Nothing that an agent could take for a number (P27).
    assert passed_on(header) == "unreadable"


def test_limits_are_passed_on_in_the_agents_form():
    assert [passed_on(header) for header in (None, "0", "007", "60000")] == [None, None, "7", "60000"]


@pytest.mark.parametrize(
    ("release", "expected"),
    [("2.14.1", "60000"), ("2.15.3", "59800"), ("2.20.0", "59800"), ("2.29.6", "59800"), ("2.30.0", "60000")],
)
def test_agent_gets_a_head_start_on_clients_that_time_the_stream_themselves(release, expected):
    """T3: what these report at the limit by themselves is no timeout to their users."""
    user_agent = f"e2b-python-sdk/{release}"
    assert passed_on("60000", user_agent=user_agent) == expected
    assert passed_on("0", user_agent=user_agent) is None
    assert passed_on("x", user_agent=user_agent) == "unreadable"


def test_head_start_leaves_most_of_a_short_limit():
    limits = [passed_on(limit, user_agent="e2b-python-sdk/2.20.0") for limit in ("1", "4", "10", "500", "1000")]
    assert limits == ["1", "4", "8", "400", "800"]


@pytest.mark.parametrize(
    ("header", "expected"),
    [(None, None), ("50", 50), ("007", 7), ("0", None), ("-5", None), ("x", None), ("1.5", None), ("9" * 30, None)],
)
def test_unreadable_interval_is_left_to_the_agent(header, expected):
    assert keepalive_seconds(header) == expected
