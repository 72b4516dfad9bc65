"""What a handle keeps of a command's output: the end of each stream, within a limit (X15).

The agent passes bytes as they were written and may cut a character in two (behaviour.md O2). Bytes are kept, and become
text where somebody asks for it, so that nothing is lost to a cut.
"""

from __future__ import annotations

import codecs

__all__ = ["DEFAULT_MAX_OUTPUT_BYTES", "Decoder", "Tail"]

#: Per stream.
DEFAULT_MAX_OUTPUT_BYTES = 64 * 1024 * 1024


class Tail:
    """The last ``limit`` bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = bytearray()
        self.truncated = False

    def add(self, data: bytes) -> None:
        self._kept += data
        excess = len(self._kept) - self._limit
        if excess > 0:
            self.truncated = True
            # Taking from the front of a bytearray moves its start and not its content.
            del self._kept[:excess]

    def __bytes__(self) -> bytes:
        return bytes(self._kept)

    def text(self) -> str:
        """As UTF-8; what is none becomes U+FFFD. A character that the limit cut at the front is left out whole."""
        start = 0
        while self.truncated and start < min(3, len(self._kept)) and self._kept[start] & 0xC0 == 0x80:
            start += 1
        return self._kept[start:].decode("utf-8", "replace")


class Decoder:
    """Makes text of pieces that may end within a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """The text that is complete now; may be empty."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left at the end of the stream: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", True)
