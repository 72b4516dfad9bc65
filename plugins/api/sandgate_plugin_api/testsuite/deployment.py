"""The folders of one deployment, and backends on them, one after the other, as after restarts of a gateway."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from sandgate_plugin_api.backend import Backend, BackendContext, Capability
from sandgate_plugin_api.loading import find_backends
from sandgate_plugin_api.records import Template
from sandgate_plugin_api.settings import nearest

__all__ = ["Deployment", "Options", "eventually"]

#: Seconds. What a call leaves to be done after it has returned, such as a process that is being reaped.
_SETTLE = 20.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line and the configuration file say."""

    backend: str
    settings: Mapping[str, object] = field(default_factory=dict)
    template: str | None = None
    create_seconds: float = 60.0
    addresses: Sequence[str] = ()

    @classmethod
    def read(cls, backend: str, config: Path | None) -> Options:
        """Raises UsageError for what cannot be meant."""
        if config is None:
            return cls(backend=backend)
        try:
            tables: dict[str, Any] = tomllib.loads(config.read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise pytest.UsageError(f"--backend-config {config}: {error}") from None
        ours = tables.get("testsuite", {})
        known = {key for key, _, _ in _TESTSUITE_KEYS}
        if unknown := sorted(ours.keys() - known):
            meant = nearest(unknown[0], known)
            raise pytest.UsageError(f"--backend-config {config}: unknown key '{unknown[0]}' in [testsuite]{meant}")
        for key, wanted, holds in _TESTSUITE_KEYS:
            if key in ours and not holds(ours[key]):
                raise pytest.UsageError(f"--backend-config {config}: '{key}' in [testsuite] must be {wanted}")
        return cls(backend=backend, settings=tables.get("backends", {}).get(backend, {}), **ours)


#: Key, what it must be, and whether a value is that.
_TESTSUITE_KEYS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("template", "text", lambda value: isinstance(value, str)),
    ("create_seconds", "a number above 0", lambda value: type(value) in (int, float) and value > 0),
    (
        "addresses",
        "a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    ),
)


class Deployment:
    """Made once for all tests: what a backend makes for all its sandboxes may take long the first time."""

    def __init__(self, options: Options) -> None:
        self.options = options
        # First: one that is not there leaves no folder.
        self._class = find_backends([options.backend])[options.backend].backend
        # Short, because addresses of sockets are.
        self._folder = Path(tempfile.mkdtemp(prefix="sg-"))
        self.state_dir = self._made("state")
        self.runtime_dir = self._made("run")
        self._sandboxes = 0
        self._found: frozenset[str] | None = None

    def _made(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(mode=0o700)
        return folder

    def discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def context(self, **changes: object) -> BackendContext:
        return BackendContext(
            state_dir=self.state_dir, runtime_dir=self.runtime_dir, settings={**self.options.settings, **changes}
        )

    def construct(self, **changes: object) -> Backend:
        construct: type[Any] = self._class
        backend: Backend = construct(self.context(**changes))
        return backend

    @asynccontextmanager
    async def backend(self) -> AsyncIterator[Backend]:
        """A backend that was opened, as a gateway that has just started has it."""
        backend = self.construct()
        await backend.open()
        try:
            yield backend
        finally:
            await backend.close()

    def new_id(self) -> str:
        """Unique for all time, as the core's ids are."""
        self._sandboxes += 1
        return f"i{self._sandboxes:06d}{os.urandom(7).hex()}"

    async def template(self, backend: Backend) -> Template:
        if (wanted := self.options.template) is not None:
            found = await backend.find_template(wanted)
            assert found is not None, f"find_template({wanted!r}), the template of [testsuite], found nothing"
            return found
        listed = await backend.templates()
        assert listed, "templates() lists none: name one in [testsuite] of --backend-config"
        return listed[0]

    async def limited(self, backend: Backend, *, cpu_count: int, memory_mb: int) -> Template:
        """The template with other limits, as policy may ask for. Skips where none are claimed."""
        if Capability.LIMITS not in backend.capabilities:
            pytest.skip(f"backend '{backend.name}' does not claim {Capability.LIMITS.value}")
        template = await self.template(backend)
        resources = replace(template.resources, cpu_count=cpu_count, memory_mb=memory_mb)
        return replace(template, resources=resources)

    @asynccontextmanager
    async def elsewhere(self) -> AsyncIterator[Backend]:
        """A backend with the same settings on another machine, as far as folders are one."""
        other = Deployment(self.options)
        try:
            async with other.backend() as backend:
                yield backend
        finally:
            other.discard()

    async def left_over(self) -> list[str]:
        """What is there now and was not before the first sandbox: asked while no backend is open."""
        assert self._found is not None, "remember() was not called"
        found = self._found

        def left() -> list[str]:
            return sorted(self._files() - found) + _processes_about(self._folder)

        await eventually(lambda: not left(), within=_SETTLE)
        return left()

    def remember(self) -> None:
        """Take what is there now for what belongs to the deployment and not to a sandbox."""
        self._found = self._files()

    def _files(self) -> frozenset[str]:
        below = (path for folder in (self.state_dir, self.runtime_dir) for path in folder.rglob("*"))
        return frozenset(str(path.relative_to(self._folder)) for path in below)


async def eventually(holds: Any, *, within: float) -> bool:
    """Whether ``holds()`` becomes true in time; asked ten times a second."""
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while not holds():
        if loop.time() > end:
            return False
        await asyncio.sleep(0.1)
    return True


def _processes_about(folder: Path) -> list[str]:
    """Processes of this machine whose arguments, environment or working directory name the deployment's folders."""
    mark = str(folder).encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        try:
            arguments = (process / "cmdline").read_bytes()
            about = [arguments, (process / "environ").read_bytes(), os.fsencode(os.readlink(process / "cwd"))]
        except OSError:
            continue  # It ended, or is another user's.
        if any(mark in text for text in about):
            words = arguments.replace(b"\0", b" ").decode(errors="replace").strip()
            found.append(f"process {process.name}: {words[:120]}")
    return found
