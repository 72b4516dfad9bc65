"""How the C library's allocator treats the memory of file content, which passes here in pieces of some hundred KiB.

Left alone, glibc gives each freed piece back to the kernel and gets it again, page by page, for the next: more than half of
an upload's time. Set by a call and not by the environment, which children would inherit and other allocators misread.
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_pieces"]

# Numbers of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
#: Single blocks from this size on go back to the kernel at once, as a large RPC's message should.
_LARGE = 4 * 1024 * 1024
#: What may stay with the process after the last transfer.
_KEPT = 16 * 1024 * 1024


def keep_freed_pieces() -> None:
    """Has no effect with a C library that has no such choice."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
