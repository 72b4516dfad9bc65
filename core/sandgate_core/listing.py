"""Which sandboxes a list holds, in which order, and where a page ends (C17 to C23).

Newest first, equal times by id; ascending is the exact reverse. A page token names the last entry of a page and the
direction, not a number of entries, so a sandbox that ends between two pages shifts nothing: none comes twice, none is
missed. The order itself is kept by :mod:`sandgate_core.ordering`.

An answer is one message, so it has a size too: a page also ends where its sandboxes would fill more than a gRPC client takes
that sets nothing, and a list in one piece is refused when it would be larger than any message here.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from sandgate_core.records import SandboxRecord
from sandgate_core.states import State
from sandgate_errors import InvalidArgument, ResourceExhausted

__all__ = ["LARGEST_PAGE", "Page", "Query", "page_of", "place_of", "position_of", "shown_state"]

LARGEST_PAGE = 100
#: Bytes. gRPC clients take messages of 4 MiB unless told otherwise.
_LARGEST_PAGE_BYTES = 3 * 1024 * 1024
#: Bytes. The server sends messages of 64 MiB.
_LARGEST_LIST_BYTES = 48 * 1024 * 1024
#: Bytes that a sandbox fills in a message at most beside its texts, and a text beside its characters.
_BYTES_BESIDE_TEXTS = 1024
_BYTES_BESIDE_TEXT = 16
_POSITION = re.compile(r"1([ad])(-?[0-9]{1,19})\.([a-z0-9]{1,64})")


@dataclass(frozen=True, kw_only=True)
class Query:
    """What to list."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    #: Shown states; empty: all.
    states: frozenset[State] = frozenset()
    #: Names that mean the template asked for; None: any template.
    templates: frozenset[str] | None = None
    #: Microseconds since 1970, inclusive.
    started_after: int | None = None
    ascending: bool = False
    #: None: all in one page.
    page_size: int | None = LARGEST_PAGE
    page_token: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page of a list."""

    records: list[SandboxRecord]
    #: Empty on the last page.
    next_token: str
    #: Running ones after filters, before paging (C20).
    total_running: int


def shown_state(state: State) -> State:
    """What a client sees of a state (C14): resting states, and for a passing one the state it is as good as."""
    match state:
        case State.PAUSING | State.RESUMING | State.PAUSED:
            return State.PAUSED
        case State.SNAPSHOTTING | State.RUNNING:
            return State.RUNNING
        case _:
            raise ValueError(f"a sandbox that is {state.value} is not shown")


def page_of(found: list[SandboxRecord], query: Query, *, total_running: int) -> Page:
    """The page that begins with ``found``: in the order of the list, and with one more than the page where there is more.

    Raises ResourceExhausted for a list that is too large for one piece.
    """
    page = _whole(found) if query.page_size is None else _first_of(found, query.page_size)
    more = len(found) > len(page)
    return Page(records=page, next_token=_token_of(page[-1], query) if more else "", total_running=total_running)


def _whole(found: list[SandboxRecord]) -> list[SandboxRecord]:
    if sum(map(_bytes_of, found)) > _LARGEST_LIST_BYTES:
        raise ResourceExhausted(
            f"{len(found)} sandboxes are too many for a list in one piece: use the one in pages, GET /v2/sandboxes",
            should_retry=False,
        )
    return found


def _first_of(found: list[SandboxRecord], size: int) -> list[SandboxRecord]:
    """At most ``size``, and one at least where there is one: else nobody would come past it."""
    page: list[SandboxRecord] = []
    room = _LARGEST_PAGE_BYTES
    for record in found[:size]:
        room -= _bytes_of(record)
        if room < 0 and page:
            break
        page.append(record)
    return page


def _bytes_of(record: SandboxRecord) -> int:
    """An upper bound of what a record fills in a message."""
    texts = [record.template_id, record.alias, record.backend]
    for pair in record.metadata.items():
        texts += pair
    if record.network is not None:
        rules = record.network
        texts += [*rules.allow_out, *rules.deny_out, rules.mask_request_host]
    return _BYTES_BESIDE_TEXTS + sum(len(text.encode()) + _BYTES_BESIDE_TEXT for text in texts)


def place_of(record: SandboxRecord) -> tuple[int, str]:
    """The sort key of "newest first, equal times by id"."""
    return (-(record.started_at or 0), record.id)


def _token_of(record: SandboxRecord, query: Query) -> str:
    started, sandbox_id = place_of(record)
    text = f"1{'a' if query.ascending else 'd'}{started}.{sandbox_id}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def position_of(query: Query) -> tuple[int, str] | None:
    """Behind which place a page begins; None: at the start. Raises InvalidArgument for a token that is not ours."""
    if not query.page_token:
        return None
    found = _POSITION.fullmatch(_decoded(query.page_token))
    if found is None or found[1] != ("a" if query.ascending else "d"):
        raise InvalidArgument("the page token is not valid for this list")
    return int(found[2]), found[3]


def _decoded(token: str) -> str:
    try:
        # `validate` by alphabet: the decoder alone skips characters it does not know.
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        return raw.decode("ascii")
    except (binascii.Error, ValueError):
        return ""
