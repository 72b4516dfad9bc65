"""Filters, order and paging (C17 to C23): the rules on records, then the way through gRPC."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandgate_api.core.v1 import sandboxes_pb2
from sandgate_core import listing
from sandgate_core.listing import Page, Query, place_of
from sandgate_core.ordering import Ordering, together
from sandgate_core.records import SandboxRecord
from sandgate_core.states import State
from sandgate_errors import InvalidArgument, ResourceExhausted
from sandgate_plugin_api import Resources

NOBODY_KNOWS = (State.CREATING, State.KILLING, State.KILLED, State.FAILED)


def record(
    number: int, *, started: int = 5, state: State = State.RUNNING, metadata=None, owner: str = "o"
) -> SandboxRecord:
    return SandboxRecord(
        id=f"i{number:04}",
        owner=owner,
        backend="b",
        template_id="base",
        alias="",
        state=state,
        created_at=0,
        started_at=started,
        timeout=1,
        metadata=metadata or {},
        resources=Resources(cpu_count=1, memory_mb=1, disk_size_mb=1),
        handle={},
    )


# Few different times, so that equal ones are common.
records = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(list(State))), max_size=30).map(
    lambda drawn: [record(n, started=started, state=state) for n, (started, state) in enumerate(drawn)]
)


def page_of(found: list[SandboxRecord], query: Query) -> Page:
    matching = Ordering(found).find(query, owner="o")
    return listing.page_of(matching.records, query, total_running=matching.running)


def walk(found: list[SandboxRecord], **query) -> list[list[SandboxRecord]]:
    pages, token = [], ""
    while True:
        page = page_of(found, Query(page_token=token, **query))
        pages.append(page.records)
        assert len(pages) <= len(found) + 1, "paging does not end"
        token = page.next_token
        if not token:
            return pages


@given(records, st.integers(1, 7), st.booleans())
def test_pages_hold_every_shown_sandbox_once_and_in_order(found, size, ascending):
    pages = walk(found, page_size=size, ascending=ascending)
    seen = [entry for page in pages for entry in page]
    expected = sorted((r for r in found if r.state not in NOBODY_KNOWS), key=lambda r: (-r.started_at, r.id))
    assert seen == (expected[::-1] if ascending else expected)
    # A token only when more follows: no page but a single first one is empty.
    assert all(len(page) == size for page in pages[:-1])
    assert len(pages) == 1 or pages[-1]


@given(records, st.integers(1, 7), st.booleans(), st.data())
def test_sandboxes_that_end_between_pages_shift_nothing(found, size, ascending, data):
    first = page_of(found, Query(page_size=size, ascending=ascending))
    if not first.next_token:
        return
    gone = data.draw(st.sets(st.sampled_from([r.id for r in found])))
    left = [r for r in found if r.id not in gone]
    rest = page_of(left, Query(page_size=None, ascending=ascending, page_token=first.next_token)).records
    everything = page_of(found, Query(page_size=None, ascending=ascending)).records
    assert rest == [r for r in everything if r.id not in gone and r not in first.records]


@given(st.text(max_size=40))
def test_junk_token_is_refused(token):
    if token:
        with pytest.raises(InvalidArgument):
            page_of([record(1)], Query(page_token=token))


@pytest.mark.parametrize(
    "text", ["", "1d5", "1x5.i1", "1d5.", "1d.i1", "1d5.I1", "2d5.i1", "1d5.i1 ", "1d" + "9" * 20 + ".i1", "1d٥.i1"]
)
def test_forged_token_is_refused(text):
    token = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
    with pytest.raises(InvalidArgument):
        page_of([record(1)], Query(page_token=token or "="))


def test_token_holds_for_its_own_direction_only():
    found = [record(n) for n in range(5)]
    token = page_of(found, Query(page_size=2)).next_token
    with pytest.raises(InvalidArgument):
        page_of(found, Query(page_token=token, ascending=True))


def test_total_counts_running_ones_after_filters_and_before_paging():
    # C20
    found = [record(n, metadata={"n": str(n % 2)}) for n in range(6)] + [record(9, state=State.PAUSED)]
    assert page_of(found, Query(page_size=1)).total_running == 6
    assert page_of(found, Query(page_size=1, metadata={"n": "0"})).total_running == 3
    assert page_of(found, Query(states=frozenset({State.PAUSED}))).total_running == 0


def test_passing_states_are_shown_as_what_they_are_as_good_as():
    # C14
    paused = Query(states=frozenset({State.PAUSED}))
    running = Query(states=frozenset({State.RUNNING}))
    found = [record(n, state=state) for n, state in enumerate(State)]
    assert {r.state for r in page_of(found, paused).records} == {State.PAUSED, State.PAUSING, State.RESUMING}
    assert {r.state for r in page_of(found, running).records} == {State.RUNNING, State.SNAPSHOTTING}


@given(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3), st.data())
def test_metadata_filter_matches_exactly_when_every_pair_does(metadata, data):
    wanted = data.draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
    matches = bool(page_of([record(1, metadata=metadata)], Query(metadata=wanted)).records)
    assert matches == (wanted.items() <= metadata.items())


def test_page_ends_before_its_message_is_larger_than_clients_take():
    found = [record(n, started=n, metadata={f"{k}": "é" * 250_000 for k in range(2)}) for n in range(10)]
    assert [len(page) for page in walk(found, page_size=100)] == [3, 3, 3, 1]


def test_sandbox_that_is_larger_than_a_page_is_a_page_of_its_own():
    found = [record(n, started=n, metadata={"a": "x" * 5_000_000}) for n in range(3)]
    assert [len(page) for page in walk(found, page_size=100)] == [1, 1, 1]


def test_list_in_one_piece_that_fits_no_message_is_refused():
    found = [record(n, metadata={"a": "x" * 5_000_000}) for n in range(11)]
    with pytest.raises(ResourceExhausted, match="/v2/sandboxes"):
        page_of(found, Query(page_size=None))
    assert len(page_of(found[:10], Query(page_size=None)).records) == 10


# What a query may ask beside its page.
questions = st.builds(
    Query,
    states=st.frozensets(st.sampled_from([State.RUNNING, State.PAUSED])),
    metadata=st.dictionaries(st.just("n"), st.sampled_from("012"), max_size=1),
    templates=st.sampled_from([None, frozenset({"base"}), frozenset()]),
    started_after=st.none() | st.integers(0, 3),
    ascending=st.booleans(),
    page_size=st.none() | st.integers(1, 5),
)
changes = st.lists(
    st.builds(
        lambda number, started, state, mine: record(
            number, started=started, state=state, metadata={"n": str(number % 3)}, owner="o" if mine else "other"
        ),
        st.integers(0, 9),
        st.integers(0, 3),
        st.sampled_from(list(State)),
        st.booleans(),
    ),
    max_size=40,
)


def by_hand(records: list[SandboxRecord], query: Query, *, owner: str | None) -> list[SandboxRecord]:
    """What :class:`Ordering` promises, one record at a time."""
    wanted = [
        r
        for r in records
        if r.state not in NOBODY_KNOWS
        and owner in {None, r.owner}
        and (not query.states or listing.shown_state(r.state) in query.states)
        and query.metadata.items() <= r.metadata.items()
        and (query.templates is None or r.template_id in query.templates)
        and (query.started_after is None or r.started_at >= query.started_after)
    ]
    return sorted(wanted, key=place_of, reverse=query.ascending)


@given(changes, st.sets(st.integers(0, 9)), questions, st.sampled_from(["o", "other", "nobody", None]))
def test_order_that_is_kept_is_the_order_of_the_records_as_they_are(changed, gone, query, owner):
    """C17, C18, C20: whatever sandboxes went through, and whoever asks."""
    ordering, last = Ordering(), {}
    for each in changed:
        ordering.put(each)
        last[each.id] = each
    for number in gone:
        ordering.drop(f"i{number:04}")
        last.pop(f"i{number:04}", None)
    expected = by_hand(list(last.values()), query, owner=owner)
    found = ordering.find(query, owner=owner)
    assert found.records == (expected if query.page_size is None else expected[: query.page_size + 1])
    assert found.running == sum(r.state in {State.RUNNING, State.SNAPSHOTTING} for r in expected)
    assert len(ordering) == sum(r.state not in NOBODY_KNOWS for r in last.values())


@given(records, st.sets(st.integers(0, 29)), questions)
def test_list_from_two_cores_is_the_one_of_all_their_sandboxes(found, here, query):
    parts = [[r for n, r in enumerate(found) if (n in here) is mine] for mine in (True, False)]
    apart = together(query, [Ordering(part).find(query, owner="o") for part in parts])
    assert apart == Ordering(found).find(query, owner="o")


def test_sandboxes_that_have_gone_leave_nothing_behind():
    ordering = Ordering()
    for number in range(100):
        ordering.put(record(number, owner=f"o{number}"))
        ordering.put(record(number, owner=f"o{number}", state=State.KILLED))
    assert (len(ordering), ordering._rows) == (0, {})


async def test_sandboxes_of_the_largest_size_are_listed_to_a_client_with_usual_limits(core):
    owner = core.owner
    metadata = {f"{n:03}": "x" * 253 for n in range(256)}
    made = [await owner.create(metadata=metadata) for _ in range(60)]
    seen, token = [], ""
    while True:
        page = await owner.call("List", page_token=token)
        seen += [sandbox.id for sandbox in page.sandboxes]
        token = page.next_page_token
        if not token:
            break
    assert seen == [sandbox.id for sandbox in reversed(made)]


async def test_list_answers_filters_and_pages(core):
    owner = core.owner
    made = [await owner.create(metadata={"n": str(n), "kind": "even" if n % 2 == 0 else "odd"}) for n in range(5)]
    newest_first = [sandbox.id for sandbox in reversed(made)]
    assert await owner.ids() == newest_first
    assert await owner.ids(order=sandboxes_pb2.ORDER_ASC) == newest_first[::-1]
    assert await owner.ids(metadata={"kind": "even", "n": "2"}) == [made[2].id]
    assert await owner.ids(metadata={"kind": "eve"}) == []
    assert await owner.ids(template="default-image") == newest_first
    assert await owner.ids(template="nobody-knows-this") == []
    assert await owner.ids(started_after=made[3].started_at) == newest_first[:2]
    assert await owner.ids(states=[sandboxes_pb2.SANDBOX_STATE_PAUSED]) == []
    assert await owner.ids(all=True) == newest_first
    page = await owner.call("List", page_size=2)
    assert page.total_running == 5
    await owner.call("Kill", id=made[2].id)
    assert await owner.ids(page_size=2, page_token=page.next_page_token) == newest_first[3:]
    assert await owner.ids(page_size=1000)


@pytest.mark.parametrize(
    "fields",
    [
        {"page_size": -1},
        {"page_token": "junk"},
        {"order": 9},
        {"states": [9]},
        {"states": [sandboxes_pb2.SANDBOX_STATE_UNSPECIFIED]},
        {"all": True, "page_size": 5},
        {"all": True, "page_token": "x"},
    ],
)
async def test_bad_list_request_is_refused(core, fields):
    with pytest.raises(InvalidArgument):
        await core.owner.call("List", **fields)
