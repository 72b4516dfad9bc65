"""The end of one process's output, kept for replay (behaviour.md X11-X14).

Programs write lines as often as full buffers, so what is kept is measured in bytes and not in pieces. Small pieces lie side
by side in blocks, which are what is forgotten at once; each piece keeps its number and its borders, so that who comes back
gets the very pieces that he missed.
"""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Past", "Piece", "Retention", "Stream"]

#: What one block holds, unless its only piece is larger.
_BLOCK_BYTES = 32 * 1024
#: What a piece counts for at least: its mark is memory too.
_LEAST_BYTES = 8
#: A piece's mark: its size, above the two bits of its stream.
_STREAM_BITS = 2
_STREAM_MASK = (1 << _STREAM_BITS) - 1


class Stream(enum.IntEnum):
    """Where a piece was written to; the numbers are those of the event's fields."""

    STDOUT = 1
    STDERR = 2
    PTY = 3

    @property
    def piece_size(self) -> int:
        return 16 * 1024 if self is Stream.PTY else 32 * 1024


class Piece(NamedTuple):
    """Bytes of one stream, never empty."""

    seq: int
    stream: Stream
    data: bytes

    @property
    def weight(self) -> int:
        """The bytes that it counts for."""
        size = len(self.data)
        return max(_LEAST_BYTES, size)


class _Block:
    """Pieces that follow one another. Grows at its end only, also while it is read."""

    __slots__ = ("_data", "_marks", "first_seq", "weight")

    def __init__(self, first: Piece, weight: int) -> None:
        self.first_seq = first.seq
        self.weight = weight
        # Not copied before a second one comes, which never does where pieces are large.
        self._data: bytes | bytearray = first.data
        self._marks = array("I", [_mark(first)])

    @property
    def end_seq(self) -> int:
        return self.first_seq + len(self._marks)

    def add(self, piece: Piece, weight: int) -> bool:
        """Whether there was room for it."""
        if self.weight + weight > _BLOCK_BYTES:
            return False
        if isinstance(self._data, bytes):
            self._data = bytearray(self._data)
        self._data += piece.data
        self._marks.append(_mark(piece))
        self.weight += weight
        return True

    def weight_since(self, seq: int) -> int:
        """What the pieces from this number on count for."""
        skipped = self._marks[: max(0, seq - self.first_seq)]
        return self.weight - sum(max(mark >> _STREAM_BITS, _LEAST_BYTES) for mark in skipped)

    def pieces(self, first: int, end: int) -> Iterator[Piece]:
        """Those whose number is at least ``first`` and below ``end``."""
        offset = 0
        for number in range(min(end, self.end_seq) - self.first_seq):
            mark = self._marks[number]
            size = mark >> _STREAM_BITS
            seq = self.first_seq + number
            if seq >= first:
                data = bytes(memoryview(self._data)[offset : offset + size])
                yield Piece(seq, Stream(mark & _STREAM_MASK), data)
            offset += size


def _mark(piece: Piece) -> int:
    return len(piece.data) << _STREAM_BITS | piece.stream


class Past:
    """What one who attaches gets of it: what was retained in that moment, whatever is forgotten afterwards."""

    def __init__(self, blocks: tuple[_Block, ...], *, first_seq: int, end_seq: int) -> None:
        self.first_seq = first_seq
        #: Pieces that were not taken yet.
        self.left = end_seq - first_seq
        #: What all of it counts for.
        self.weight = sum(block.weight_since(first_seq) for block in blocks)
        self._pieces = (piece for block in blocks for piece in block.pieces(first_seq, end_seq))

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        piece = next(self._pieces)
        self.left -= 1
        return piece


class Retention:
    """Owns the blocks. Numbers are given by who adds."""

    def __init__(self, capacity: int) -> None:
        """``capacity`` in bytes, which is the least that is kept; it may be nearly a block more."""
        self._capacity = capacity
        self._blocks: deque[_Block] = deque()
        #: Bytes that it holds, as pieces count.
        self.weight = 0

    def add(self, piece: Piece) -> None:
        weight = piece.weight
        if not (self._blocks and self._blocks[-1].add(piece, weight)):
            self._blocks.append(_Block(piece, weight))
        self.weight += weight

    def forget_old(self, besides: int = 0) -> None:
        """Keep the capacity and ``besides`` bytes more."""
        keep = self._capacity + besides
        while self._blocks and self.weight - self._blocks[0].weight >= keep:
            self.weight -= self._blocks.popleft().weight

    def clear(self) -> None:
        self._blocks.clear()
        self.weight = 0

    def since(self, from_seq: int | None, next_seq: int) -> Past:
        """For who attaches: nothing of the past unless asked for (A3), else what is left from there on (X11).

        ``next_seq`` is the number that the next piece will have.
        """
        wanted = next_seq if from_seq is None else min(from_seq, next_seq)
        blocks = tuple(block for block in self._blocks if block.end_seq > wanted)
        first = max(wanted, blocks[0].first_seq) if blocks else next_seq
        return Past(blocks, first_seq=first, end_seq=next_seq)
