"""From plugins to opened backends.

Plugins announce themselves by entry points. The core reads these itself and loads only what the configured backends
need, so a faulty plugin that nobody configured cannot keep the gateway from starting; every error names the distribution
it comes from. By convention an entry point has the name of its backend; where none has, all are asked.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pluggy
import structlog

from sandgate_errors import FailedPrecondition, SandgateError
from sandgate_plugin_api import ENTRY_POINT_GROUP, PROJECT, Backend, BackendContext, hookspecs

__all__ = ["Installed", "find_backends", "open_backends"]

#: Bytes of a unix socket's address, and what a backend is promised of them.
_SOCKET_PATH = 107
_PROMISED = 40
#: Seconds a backend may take to let go of what it holds when the core stops.
_CLOSE_PATIENCE = 5.0
#: It is a folder's name and a table's in the configuration.
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Installed:
    """A backend class and the distribution it came from."""

    backend: type[Backend]
    distribution: str


class _Plugins:
    """Collects what the loaded plugins offer."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self.backends: dict[str, Installed] = {}

    def load(self, entry: EntryPoint) -> None:
        """Import one plugin and take what it registers. Raises FailedPrecondition naming the distribution."""
        source = _distribution_of(entry)
        try:
            plugin = entry.load()
        except (Exception, SystemExit) as error:
            raise FailedPrecondition(f"plugin '{source}' cannot be imported: {_one_line(error)}") from error
        if self._manager.is_registered(plugin):
            return
        try:
            self._manager.register(plugin, name=f"{source}:{entry.name}")
            self._register_backends(plugin, source)
        except SandgateError:
            raise
        except Exception as error:
            raise FailedPrecondition(f"plugin '{source}' cannot be used: {_one_line(error)}") from error

    def _register_backends(self, plugin: object, source: str) -> None:
        others = [other for other in self._manager.get_plugins() if other is not plugin]
        hook = self._manager.subset_hook_caller("sandgate_register_backends", remove_plugins=others)
        if not hook.get_hookimpls():
            raise FailedPrecondition(f"plugin '{source}' does not implement the hook sandgate_register_backends")
        hook(registrar=_Registrar(self.backends, source))


class _Registrar:
    """What a plugin's hook gets: adds backends in the name of its distribution."""

    def __init__(self, backends: dict[str, Installed], source: str) -> None:
        self._backends = backends
        self._source = source

    def add(self, backend: type[Backend]) -> None:
        if not (inspect.isclass(backend) and issubclass(backend, Backend)):
            raise FailedPrecondition(f"plugin '{self._source}' registers {backend!r}, which is not a Backend class")
        name = getattr(backend, "name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise FailedPrecondition(f"plugin '{self._source}' registers {backend.__name__} without a usable name")
        missing = sorted(getattr(backend, "__abstractmethods__", ()))
        if missing:
            raise FailedPrecondition(
                f"backend '{name}' of plugin '{self._source}' does not implement {', '.join(missing)}"
            )
        known = self._backends.get(name)
        if known is not None and known.backend is not backend:
            raise FailedPrecondition(
                f"backend '{name}' is offered by both '{known.distribution}' and '{self._source}': uninstall one of them"
            )
        self._backends[name] = Installed(backend, self._source)


def find_backends(names: Iterable[str], *, installed: Iterable[EntryPoint] | None = None) -> dict[str, Installed]:
    """The classes of the backends ``names``. Raises FailedPrecondition with one line for the operator."""
    entries = list(entry_points(group=ENTRY_POINT_GROUP) if installed is None else installed)
    plugins = _Plugins()
    return {name: _find(name, entries, plugins) for name in names}


def _find(name: str, entries: list[EntryPoint], plugins: _Plugins) -> Installed:
    for entry in entries:
        if entry.name == name:
            plugins.load(entry)
    if name in plugins.backends:
        return plugins.backends[name]
    failures = [failure for entry in entries if (failure := _tried(entry, plugins)) is not None]
    if name in plugins.backends:
        return plugins.backends[name]
    raise FailedPrecondition(_unknown(name, sorted(plugins.backends), failures))


def _tried(entry: EntryPoint, plugins: _Plugins) -> str | None:
    """Load a plugin that may or may not offer the backend looked for; its fault is only worth a mention."""
    try:
        plugins.load(entry)
    except FailedPrecondition as error:
        return error.message
    return None


def _unknown(name: str, known: list[str], failures: list[str]) -> str:
    listed = ", ".join(f"'{other}'" for other in known) or "none"
    hint = f"pip install sandgate-plugin-{name}" if _NAME.fullmatch(name) else "install the plugin that offers it"
    text = f"there is no backend '{name}'; installed: {listed}; to get it: {hint}"
    return text if not failures else f"{text} ({'; '.join(failures)})"


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
        backend: Backend = construct(context)
        await backend.open()
    except SandgateError as error:
        raise FailedPrecondition(f"backend '{name}': {error.message}") from error
    except Exception as error:
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


def _distribution_of(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
