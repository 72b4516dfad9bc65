"""The one table of errors on every plane (rest.md 1.3, envd.md 2.6, behaviour W2, W6, D3, R4)."""

from __future__ import annotations

import json
from http import HTTPStatus

import pytest

from sandgate_edge import responses
from sandgate_edge.connect import Code
from sandgate_edge.routing import PortClosed, SandboxGone
from sandgate_errors import (
    AlreadyExists,
    Canceled,
    CapabilityMissing,
    Conflict,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NoSpace,
    NotFound,
    PermissionDenied,
    RequestMismatch,
    ResourceExhausted,
    SandboxNotFound,
    SandboxUnreachable,
    SandgateError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    all_errors,
)

PUBLISHED = [cls for cls in all_errors() if cls.__module__ == "sandgate_errors"]


def body_of(response) -> object:
    return json.loads(response.body)


def test_no_error_of_the_taxonomy_is_missing_from_the_table():
    assert {cls for cls in PUBLISHED if cls not in responses.TABLE} == set()


@pytest.mark.parametrize("cls", PUBLISHED)
def test_every_error_is_told_on_every_plane(cls):
    """C56, D3, W6."""
    error = cls("what happened")
    rest, files = responses.rest_error(error), responses.files_error(error)
    for response in (rest, files):
        # Python's REST client fails on numbers it has no name for.
        assert HTTPStatus(response.status) >= 400
        assert body_of(response) == {"code": response.status, "message": "what happened"}
        assert response.headers["Content-Type"] == "application/json; charset=utf-8"
    unary = responses.connect_error(error)
    assert body_of(unary) == {"code": responses.meaning_of(error).connect.value, "message": "what happened"}
    assert unary.status == responses.meaning_of(error).connect.http_status
    assert unary.headers["Content-Type"] == "application/json"
    frame = responses.end_frame(error)
    assert frame[0] == 2
    assert int.from_bytes(frame[1:5]) == len(frame) - 5
    assert json.loads(frame[5:]) == {"error": body_of(unary)}


@pytest.mark.parametrize(
    ("error", "rest", "connect", "files"),
    [
        (InvalidArgument("m"), 400, "invalid_argument", 400),
        (NotFound("m"), 404, "not_found", 404),
        (SandboxNotFound("m"), 404, "unavailable", 502),
        (Conflict("m"), 409, "aborted", 409),
        (ResourceExhausted("m"), 429, "resource_exhausted", 429),
        (NoSpace("m"), 507, "resource_exhausted", 507),
        (Unavailable("m"), 503, "unavailable", 503),
    ],
)
def test_statuses_that_sdks_branch_on(error, rest, connect, files):
    assert responses.rest_error(error).status == rest
    assert body_of(responses.connect_error(error))["code"] == connect
    assert responses.files_error(error).status == files


def test_class_of_a_plugin_is_told_as_its_nearest_parent():
    class Mine(NotFound): ...

    assert responses.meaning_of(Mine("m")) == responses.TABLE[NotFound]


def test_every_connect_code_has_a_status():
    assert {code.http_status for code in Code} >= {400, 401, 403, 404, 409, 429, 499, 500, 501, 503, 504}


def test_success_frame_has_no_error_member():
    assert responses.end_frame(None) == b"\x02\x00\x00\x00\x02{}"


#: Of each class, seconds after which a client may ask again that is told nothing else; None: it is not "not now".
LATER = {
    InvalidArgument: None,
    CapabilityMissing: None,
    RequestMismatch: None,
    Unauthenticated: None,
    PermissionDenied: None,
    NotFound: None,
    SandboxNotFound: None,
    AlreadyExists: None,
    FailedPrecondition: None,
    Conflict: "2",
    ResourceExhausted: "2",
    NoSpace: None,
    Canceled: "2",
    DeadlineExceeded: None,
    Unavailable: "2",
    SandboxUnreachable: "2",
    Unimplemented: None,
    DataLoss: None,
    Internal: None,
    SandgateError: None,
}


@pytest.mark.parametrize("cls", PUBLISHED)
def test_what_is_not_now_says_when_on_every_plane_and_nothing_else_does(cls):
    """errors.md 2.1: rate limits and overload; rest.md 1.4: whether a client may repeat is said only by who knows."""
    error = cls("m")
    for response in (responses.rest_error(error), responses.files_error(error), responses.connect_error(error)):
        # 502 is of one sandbox, and 499 and 507 are not for a time.
        assert response.headers.get("Retry-After") == (LATER[cls] if response.status in {409, 429, 503} else None)
        assert "Should-Retry" not in response.headers


@pytest.mark.parametrize("cls", PUBLISHED)
@pytest.mark.parametrize("should_retry", [True, False])
def test_advice_of_who_knows_is_passed_on(cls, should_retry):
    error = cls("m", retry_after=7, should_retry=should_retry)
    for response in (responses.rest_error(error), responses.files_error(error), responses.connect_error(error)):
        assert response.headers["Retry-After"] == "7"
        assert response.headers["Should-Retry"] == ("true" if should_retry else "false")
    useless = responses.rest_error(cls("m", should_retry=False))
    assert "Retry-After" not in useless.headers


def test_retry_advice_is_whole_seconds():
    told = responses.rest_error(Unavailable("m", retry_after=1.2, should_retry=False, error_code="slug"))
    assert (told.headers["Retry-After"], told.headers["Should-Retry"]) == ("2", "false")
    assert body_of(told) == {"code": 503, "message": "m", "error_code": "slug"}
    assert "Retry-After" not in responses.rest_error(Unavailable("m", retry_after=float("inf"))).headers


def test_slug_stays_off_the_data_plane():
    assert body_of(responses.files_error(NotFound("m", error_code="slug"))) == {"code": 404, "message": "m"}


def test_missing_sandbox_and_silent_port_have_their_own_bodies():
    gone = responses.files_error(SandboxGone("iabc"))
    assert (gone.status, body_of(gone)) == (
        502,
        {"sandboxId": "iabc", "message": "The sandbox was not found", "code": 502},
    )
    closed = responses.files_error(PortClosed("iabc", 49983))
    message = "The sandbox is running but port is not open"
    assert (closed.status, body_of(closed)) == (
        502,
        {"sandboxId": "iabc", "message": message, "port": 49983, "code": 502},
    )


def test_unknown_exception_shows_a_reference_and_never_its_text(capsys):
    error = responses.internal(ValueError("secret detail"), request_id="r1")
    assert isinstance(error, Internal)
    assert "secret" not in error.message
    reference = error.message.rsplit(" ", 1)[-1]
    assert reference in capsys.readouterr().out


def test_message_with_half_a_character_can_be_sent():
    error = SandgateError("bad name \udcff")
    assert responses.rest_error(error).status == 500
    assert responses.end_frame(error)
