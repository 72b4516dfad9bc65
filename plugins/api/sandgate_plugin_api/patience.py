"""Awaiting what a cancellation must not tear apart.

The contract says that a create which is cancelled leaves nothing and that a destroy goes on. Behind both is often work that
cannot be called back: an engine or a server goes on with a request whose connection is gone, and a thread cannot be stopped.
To give such work up would only mean not knowing what became of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

__all__ = ["to_its_end"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


async def to_its_end(
    work: Awaitable[T],
    *,
    on_cancel: Callable[[], None] | None = None,
    expected: type[Exception] | tuple[type[Exception], ...] = (),
) -> T:
    """Await ``work`` to its end even when cancelled meanwhile; the cancellation then goes on.

    ``on_cancel`` is called at each cancellation, to hurry work that looks at something. How the work failed is logged after
    a cancellation, as nobody else hears of it, except for errors that are ``expected`` then.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
            if on_cancel is not None:
                on_cancel()
    if cancelled is not None:
        failure = None if task.cancelled() else task.exception()
        if failure is not None and not isinstance(failure, expected):
            _log.error("failed while its caller was cancelled", exc_info=failure)
        raise cancelled
    return task.result()
