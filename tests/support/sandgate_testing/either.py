"""One test text for the blocking and the asynchronous client: calls and iteration in either form."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["done", "every"]


async def done(outcome: Any) -> Any:
    """What a call gives, whether it has to be awaited or not."""
    return await outcome if inspect.isawaitable(outcome) else outcome


async def every(iterable: Any) -> list[Any]:
    """What an iteration gives, whether it has to be awaited or not."""
    return [item async for item in iterable] if hasattr(iterable, "__aiter__") else list(iterable)
