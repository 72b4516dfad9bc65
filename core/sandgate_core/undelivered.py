"""Answers that a call has given and its caller will not get: the call was cancelled while the answer was being sent.

A handler that has returned sees nothing of that, and gRPC ends the call's task as if it had gone well: it catches the
cancellation. That one was asked for stays on the task. A caller that leaves once all is sent is beyond what can be known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["if_undelivered"]


def if_undelivered(act: Callable[[], None]) -> None:
    """Run ``act`` if the current call is cancelled after its handler has returned, while the answer is being sent."""
    task = asyncio.current_task()
    if task is not None:
        task.add_done_callback(lambda ended: act() if ended.cancelling() else None)
