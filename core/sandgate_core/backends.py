"""From plugins to opened backends.

:mod:`sandgate_plugin_api.loading` finds their classes; here each is given its folders and its table, opened, and put behind
a :class:`~sandgate_core.checked_backend.CheckedBackend`, which holds it to the contract.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import structlog

from sandgate_core.checked_backend import CheckedBackend
from sandgate_errors import FailedPrecondition, SandgateError
from sandgate_plugin_api import Backend, BackendContext
from sandgate_plugin_api.loading import Installed, find_backends

__all__ = ["open_backends"]

#: Bytes of a unix socket's address, and what a backend is promised of them.
_SOCKET_PATH = 107
_PROMISED = 40
#: Seconds a backend may take to let go of what it holds when the core stops.
_CLOSE_PATIENCE = 5.0
#: Seconds to get ready in: to look at the machine, to ask a server, to make what all its sandboxes share.
_OPEN_PATIENCE = 75.0
_log = structlog.get_logger(__name__)


@asynccontextmanager
async def open_backends(
    tables: Mapping[str, Mapping[str, object]], *, state_dir: Path, runtime_dir: Path
) -> AsyncIterator[dict[str, Backend]]:
    """The configured backends, opened, closed in reverse order. ``tables`` are their settings by name."""
    found = find_backends(tables)
    opened: dict[str, Backend] = {}
    async with AsyncExitStack() as stack:
        for name, installed in found.items():
            context = BackendContext(
                state_dir=_private(state_dir / "backends" / name),
                runtime_dir=_private(_short(runtime_dir / name)),
                settings=tables[name],
            )
            opened[name] = await _opened(name, installed, context)
            stack.push_async_callback(_close, name, opened[name])
        yield opened


async def _opened(name: str, installed: Installed, context: BackendContext) -> Backend:
    # The contract says how the core constructs a backend; the abstract class leaves __init__ to the plugin.
    construct: type = installed.backend
    try:
        backend = CheckedBackend(construct(context), installed.distribution)
        async with asyncio.timeout(_OPEN_PATIENCE):
            await backend.open()
    except TimeoutError as error:
        raise FailedPrecondition(
            f"backend '{name}' of plugin '{installed.distribution}' did not open within {_OPEN_PATIENCE:g} s"
        ) from error
    except SandgateError as error:
        raise FailedPrecondition(f"backend '{name}': {error.message}") from error
    except (Exception, SystemExit) as error:
        _log.exception("a backend failed to open", backend=name, distribution=installed.distribution)
        raise FailedPrecondition(
            f"backend '{name}' of plugin '{installed.distribution}' failed to open: {_one_line(error)}"
        ) from error
    return backend


async def _close(name: str, backend: Backend) -> None:
    try:
        async with asyncio.timeout(_CLOSE_PATIENCE):
            await backend.close()
    except Exception:
        _log.exception("a backend failed to close", backend=name)


def _private(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def _short(folder: Path) -> Path:
    if len(str(folder).encode()) + _PROMISED > _SOCKET_PATH:
        raise FailedPrecondition(f"the path of the runtime directory is too long for sockets: {folder}")
    return folder


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
