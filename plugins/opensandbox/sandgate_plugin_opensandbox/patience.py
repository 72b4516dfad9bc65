"""Awaiting what a cancellation must not tear apart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["to_its_end"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """Await ``work`` to its end even when cancelled meanwhile; the cancellation then goes on.

    The server goes on with a request whose connection is gone, so giving one up would only mean not knowing.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            _log.warning("failed while its caller was cancelled: %s", failure)
        raise cancelled
    return task.result()
