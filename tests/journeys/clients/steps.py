"""Reports the steps of a journey: one line of JSON each, on standard output, read by ``test_journey.py``.

Imports nothing but the standard library: it runs in the environment of the SDK under test.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """One step. Its failure is told and the journey goes on, so that one fault does not hide the next."""
    try:
        yield
    except Exception:
        print(json.dumps({"step": name, "ok": False, "error": traceback.format_exc()}), flush=True)
    else:
        print(json.dumps({"step": name, "ok": True}), flush=True)


@contextlib.contextmanager
def raises(name: str, *texts: str) -> Iterator[list[Exception]]:
    """The block must raise exactly the exception class ``name``, not a relative; ``texts`` must stand in its message."""
    caught: list[Exception] = []
    try:
        yield caught
    except Exception as error:
        if type(error).__name__ != name:
            raise AssertionError(f"raised {type(error).__name__} instead of {name}: {error}") from error
        if missing := [text for text in texts if text not in str(error)]:
            raise AssertionError(f"{missing} not in {str(error)!r}") from error
        caught.append(error)
    else:
        raise AssertionError(f"raised nothing instead of {name}")
