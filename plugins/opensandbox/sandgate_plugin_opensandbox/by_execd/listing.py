"""The objects of a long JSON array as its text comes: what execd lists is never held whole.

A text of a few megabytes can stand for gigabytes of empty lists and dictionaries, and whoever reads it at once does nothing
else meanwhile. So no object may be longer than one entry can be, and each is made into what is kept of it before the next.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["Items"]

#: Characters of one object: a path of the longest kind with every byte escaped, three times over.
_LONGEST = 64 * 1024
_SPACE = " \t\r\n"
_SPACES = re.compile(f"[{_SPACE}]*")


class Items:
    """Of one array, or of ``null``. Raises ValueError for everything else."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._parser = json.JSONDecoder()
        self._rest = ""
        self._begun = False
        self._ended = False
        #: Whether an object must follow: what came last was a comma.
        self._owed = False
        #: Whether an object may follow.
        self._free = True

    def feed(self, piece: bytes) -> Iterator[dict[str, Any]]:
        """Those that are whole now."""
        text = self._decoder.decode(piece)
        self._rest += text
        # Else nothing can have become whole, and to look again and again at what is not is work for nothing.
        if "}" in text or "]" in text or not self._begun:
            yield from self._whole()
        if len(self._rest) > _LONGEST:
            raise ValueError("an object is too long")

    def end(self) -> None:
        """Nothing more comes."""
        if not self._ended and (self._begun or self._rest.strip(_SPACE) not in {"", "null"}):
            raise ValueError("the list has no end")

    def _whole(self) -> Iterator[dict[str, Any]]:
        at, text = 0, self._rest
        try:
            while (at := _after_space(text, at)) < len(text):
                sign = text[at]
                if self._ended:
                    raise ValueError("something follows the list")
                if not self._begun:
                    if sign == "n" and "null".startswith(text[at:].rstrip(_SPACE)):
                        return
                    self._expect(sign == "[")
                    self._begun = True
                    at += 1
                elif sign == "]":
                    self._expect(not self._owed)
                    self._ended = True
                    at += 1
                elif sign == ",":
                    self._expect(not self._free)
                    self._free = self._owed = True
                    at += 1
                else:
                    self._expect(sign == "{" and self._free)
                    found = self._object(text, at)
                    if found is None:
                        return
                    item, at = found
                    self._free = self._owed = False
                    yield item
        finally:
            self._rest = text[at:]

    def _object(self, text: str, at: int) -> tuple[dict[str, Any], int] | None:
        """None while it is not whole."""
        try:
            item, end = self._parser.raw_decode(text, at)
        except json.JSONDecodeError:
            return None
        except RecursionError:
            raise ValueError("an object is too deep") from None
        if end - at > _LONGEST:
            raise ValueError("an object is too long")
        return item, end

    def _expect(self, expected: bool) -> None:
        if not expected:
            raise ValueError("this is no list of objects")


def _after_space(text: str, at: int) -> int:
    found = _SPACES.match(text, at)
    return at if found is None else found.end()
