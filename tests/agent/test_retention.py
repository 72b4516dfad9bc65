"""What is retained of output: measured in bytes, given back piece by piece (behaviour.md X11-X14)."""

from __future__ import annotations

import random

from sandgate_agent.retention import Piece, Retention, Stream

CAPACITY = 8 * 32 * 1024


def written(sizes: list[int], seed: int = 1) -> list[Piece]:
    chance = random.Random(seed)
    return [
        Piece(number, chance.choice(list(Stream)), chance.randbytes(size)) for number, size in enumerate(sizes, start=1)
    ]


def retained(retention: Retention, pieces: list[Piece], from_seq: int | None) -> list[Piece]:
    return list(retention.since(from_seq, len(pieces) + 1))


def test_every_place_to_go_on_from_gives_the_very_pieces_that_came_after_it() -> None:
    """X11, X12: whatever lies in one block with them."""
    chance = random.Random(7)
    pieces = written([chance.choice([1, 7, 80, 4096, 20_000, 32 * 1024]) for _ in range(100)])
    retention = Retention(CAPACITY)
    for piece in pieces:
        retention.add(piece)
        retention.forget_old()
    first = retention.since(0, len(pieces) + 1).first_seq
    assert 1 < first < 90
    for number in (0, 1, first - 1):
        assert retained(retention, pieces, number) == pieces[first - 1 :]
    for number in range(first, len(pieces) + 1):
        past = retention.since(number, len(pieces) + 1)
        assert (past.first_seq, past.left) == (number, len(pieces) + 1 - number)
        assert past.weight == sum(piece.weight for piece in pieces[number - 1 :])
        assert list(past) == pieces[number - 1 :]
        assert past.left == 0
    for nothing in (None, len(pieces) + 1, len(pieces) + 900):
        assert retained(retention, pieces, nothing) == []
        assert retention.since(nothing, len(pieces) + 1).first_seq == len(pieces) + 1


def test_small_pieces_are_kept_for_as_many_bytes_as_large_ones() -> None:
    """X13: pieces of 32 KiB are a measure and no number of writes; but the smallest count for more than they are."""
    for size, least in ((32 * 1024, 8), (100, CAPACITY // 100), (1, CAPACITY // 8)):
        pieces = written([size] * (least + 3_000))
        retention = Retention(CAPACITY)
        for piece in pieces:
            retention.add(piece)
            retention.forget_old()
        kept = retained(retention, pieces, 0)
        assert least <= len(kept) <= least + 32 * 1024 // max(size, 8)
        assert kept == pieces[-len(kept) :]


def test_what_a_reader_lacks_is_kept_besides() -> None:
    """X12."""
    pieces = written([1000] * 10_000)
    retention = Retention(CAPACITY)
    for piece in pieces:
        retention.add(piece)
        retention.forget_old(besides=400_000)
    assert sum(len(piece.data) for piece in retained(retention, pieces, 0)) >= CAPACITY + 400_000
    retention.forget_old()
    assert CAPACITY <= retention.weight < CAPACITY + 32 * 1024


def test_who_reads_while_more_is_written_and_forgotten_gets_what_there_was_when_he_came() -> None:
    """X14."""
    pieces = written([90] * 6_000)
    retention = Retention(CAPACITY)
    for piece in pieces[:1000]:
        retention.add(piece)
    past = retention.since(500, 1001)
    read = [next(past)]
    for piece in pieces[1000:]:
        retention.add(piece)
        retention.forget_old()
    assert retention.since(0, 6_001).first_seq > 1000
    assert past.left == 500
    read += past
    assert read == pieces[499:1000]
    retention.clear()
    assert (retention.weight, retained(retention, pieces, 0)) == (0, [])
