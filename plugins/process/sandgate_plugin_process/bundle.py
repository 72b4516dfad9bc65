"""The agent's library folder: the agent, its dependencies and this backend's entrance, in one place and read-only.

Made once per content, under a name derived from it, and bound into every sandbox; so a sandbox sees neither the
gateway's environment nor where it is installed, and an upgrade of the gateway does not change the files under the
agents that are running. ``docs/architecture.md``, "The agent's start".
"""

from __future__ import annotations

import compileall
import hashlib
import importlib.util
import logging
import os
import py_compile
import secrets
import shutil
import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path

from sandgate_errors import FailedPrecondition
from sandgate_plugin_process.removal import remove_tree

__all__ = ["forget", "make"]

_log = logging.getLogger(__name__)

_MODULES = (
    "sandgate_agent",
    "sandgate_api",
    "sandgate_errors",
    "grpc",
    "grpc_health",
    "google.protobuf",
    "google._upb",
    "typing_extensions",
)
# Parts of them that an agent has no use for: tests, stubs, generators, and root certificates, as it never speaks TLS.
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyi", "*.pyc", "py.typed", "tests", "test", "roots.pem", "*.proto")
_PREFIX = "bundle-"
_INNER_PATH = "/run/sandgate/agent"


def make(state: Path) -> Path:
    """The bundle of what is installed now, made if it is not there yet. Blocks, for about a second the first time."""
    sources = dict(_sources())
    target = state / f"{_PREFIX}{_digest(sources)}"
    if not target.is_dir():
        draft = state / f"{_PREFIX}new-{secrets.token_hex(4)}"
        try:
            _fill(draft, sources)
            draft.rename(target)
        finally:
            remove_tree(draft)
    return target


def forget(state: Path, keep: AbstractSet[str]) -> None:
    """Remove the bundles that are not among ``keep``, and what an interrupted start has left."""
    for path in state.glob(f"{_PREFIX}*"):
        if path.name not in keep:
            remove_tree(path)


def _sources() -> Iterator[tuple[str, Path]]:
    """(place in the bundle, file or folder to copy)."""
    yield "__main__.py", Path(__file__).with_name("enter.py")
    for name in _MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise FailedPrecondition(f"the agent's library '{name}' is not installed: install sandgate again")
        place = name.replace(".", "/")
        if spec.submodule_search_locations is not None:
            # Not by its origin: a namespace package has none.
            yield place, Path(next(iter(spec.submodule_search_locations)))
        elif spec.origin is not None:
            yield f"{place}{Path(spec.origin).suffix}", Path(spec.origin)


def _digest(sources: dict[str, Path]) -> str:
    """Changes whenever a file does. By size and time, as reading all of it would delay every start."""
    digest = hashlib.sha256(sys.version.encode())
    for place, source in sorted(sources.items()):
        for file in sorted(_files(source)):
            about = file.stat()
            digest.update(f"{place}\0{file.relative_to(source)}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _files(source: Path) -> Iterator[Path]:
    if source.is_file():
        yield source
        return
    for folder, folders, names in os.walk(source):
        dropped = _LEFT_OUT(folder, [*folders, *names])
        folders[:] = [name for name in folders if name not in dropped]
        yield from (Path(folder, name) for name in names if name not in dropped)


def _fill(draft: Path, sources: dict[str, Path]) -> None:
    draft.mkdir(mode=0o755)
    for place, source in sources.items():
        target = draft / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=_LEFT_OUT, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(source, target)
    # Unchecked: the folder never changes, so the agent need not look at the sources at all. The inner path, because
    # a traceback in a sandbox must not say where the gateway lives.
    compileall.compile_dir(
        draft,
        quiet=2,
        stripdir=str(draft),
        prependdir=_INNER_PATH,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    _open_to_all(draft)


def _open_to_all(folder: Path) -> None:
    """Whatever the gateway's umask: the agent reads this as another user."""
    for current, _, names in os.walk(folder):
        Path(current).chmod(0o755)
        for name in names:
            Path(current, name).chmod(0o644)
