"""``python -m sandgate_plugin_api.testsuite.crash``: a gateway that is killed in the middle of a create.

Reads one line of JSON (folders, backend, settings, request), opens the backend, writes ``creating`` and begins the create.
The suite kills it at a moment of its choice, as a machine or an operator might. A create that ends first is reported as
``created`` and then waits to be killed all the same.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from sandgate_plugin_api.backend import Backend, BackendContext
from sandgate_plugin_api.loading import find_backends
from sandgate_plugin_api.records import SandboxRequest

__all__: list[str] = []


async def _run(order: dict[str, Any]) -> None:
    construct: type[Any] = find_backends([order["backend"]])[order["backend"]].backend
    backend: Backend = construct(
        BackendContext(
            state_dir=Path(order["state_dir"]), runtime_dir=Path(order["runtime_dir"]), settings=order["settings"]
        )
    )
    await backend.open()
    template = await backend.find_template(order["template"])
    if template is None:
        raise LookupError(order["template"])
    request = SandboxRequest(sandbox_id=order["sandbox_id"], template=template)
    handle = backend.reserve(request)
    _say("creating")
    await backend.create(request, handle)
    _say("created")
    await asyncio.Event().wait()


def _say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_run(json.loads(sys.stdin.readline())))
