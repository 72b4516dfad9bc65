"""The content type of a file: by its extension, else by its first bytes (``behaviour.md`` D7).

The table is the interpreter's own and not the machine's, so that every gateway answers alike.
"""

from __future__ import annotations

import mimetypes
import posixpath

__all__ = ["OCTET_STREAM", "SNIFFED", "by_content", "by_extension"]

OCTET_STREAM = "application/octet-stream"
#: How many bytes from the start :func:`by_content` looks at.
SNIFFED = 512

_TYPES = mimetypes.MimeTypes(filenames=()).types_map[True]
_COMPRESSED = {
    ".gz": "application/gzip",
    ".tgz": "application/gzip",
    ".bz2": "application/x-bzip2",
    ".xz": "application/x-xz",
    ".zst": "application/zstd",
    ".7z": "application/x-7z-compressed",
}
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"%PDF-", "application/pdf"),
    (b"PK\x03\x04", "application/zip"),
    (b"\x1f\x8b\x08", "application/gzip"),
    (b"OggS\x00", "application/ogg"),
    (b"\x00asm", "application/wasm"),
)
# Control characters that no text file holds; tab, line ends, form feed and escape may stand in one.
_BINARY = frozenset(range(0x20)) - {0x09, 0x0A, 0x0C, 0x0D, 0x1B}


def by_extension(name: str) -> str | None:
    extension = posixpath.splitext(name)[1].lower()
    found = _COMPRESSED.get(extension) or _TYPES.get(extension)
    return f"{found}; charset=utf-8" if found is not None and found.startswith("text/") else found


def by_content(start: bytes) -> str:
    """A guess from the first bytes; never a type that a browser would run as a script or page."""
    for magic, found in _MAGIC:
        if start.startswith(magic):
            return found
    if _BINARY.isdisjoint(start[:SNIFFED]):
        return "text/plain; charset=utf-8"
    return OCTET_STREAM
