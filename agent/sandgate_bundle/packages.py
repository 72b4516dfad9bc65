"""The agent's packages as they are installed here: where they are, whether they have changed, and copies of them.

Used for every bundle. Names in it are *places*: paths relative to the folder that becomes a part of Python's search path.
"""

from __future__ import annotations

import compileall
import contextlib
import hashlib
import importlib.util
import os
import py_compile
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from sandgate_errors import FailedPrecondition

__all__ = ["compile_all", "copy_all", "digest", "draft_beside", "files_of", "forget_all", "open_to_all", "packages"]

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
# Parts of them that an agent has no use for: tests, stubs, generators, and root certificates, as it verifies no server.
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyi", "*.pyc", "py.typed", "tests", "test", "roots.pem", "*.proto")


def packages() -> dict[str, Path]:
    """Place to the file or folder that is to be there. Raises FailedPrecondition when one is not installed."""
    return dict(_find(name) for name in _MODULES)


def _find(name: str) -> tuple[str, Path]:
    spec = importlib.util.find_spec(name)
    place = name.replace(".", "/")
    if spec is not None and spec.submodule_search_locations is not None:
        # Not by its origin: a namespace package has none.
        return place, Path(next(iter(spec.submodule_search_locations)))
    if spec is not None and spec.origin is not None:
        return f"{place}{Path(spec.origin).suffix}", Path(spec.origin)
    raise FailedPrecondition(f"the agent's library '{name}' is not installed: install sandgate again")


def files_of(source: Path) -> Iterator[Path]:
    """The files that belong to a bundle."""
    if source.is_file():
        yield source
        return
    for folder, folders, names in os.walk(source):
        dropped = _LEFT_OUT(folder, [*folders, *names])
        folders[:] = [name for name in folders if name not in dropped]
        yield from (Path(folder, name) for name in names if name not in dropped)


def digest(sources: Mapping[str, Path]) -> str:
    """Changes whenever a file does. By size and time, as reading all of it would delay every start."""
    about = hashlib.sha256(sys.version.encode())
    for place, source in sorted(sources.items()):
        for file in sorted(files_of(source)):
            stat = file.stat()
            about.update(f"{place}\0{file.relative_to(source)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return about.hexdigest()[:16]


def copy_all(sources: Mapping[str, Path], folder: Path) -> None:
    """Copy each to its place below ``folder``."""
    for place, source in sources.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=_LEFT_OUT, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(source, target)


def compile_all(folder: Path, *, inner: str, keep_sources: bool = True) -> None:
    """Compile what is below ``folder``, which the sandbox sees as ``inner``.

    A traceback in a sandbox must not say where the gateway lives, hence the inner path. Unchecked: the folder never
    changes, so the agent need not look at the sources at all; they may as well be left out.
    """
    done = compileall.compile_dir(
        folder,
        maxlevels=sys.getrecursionlimit(),
        quiet=2,
        legacy=not keep_sources,
        stripdir=str(folder),
        prependdir=inner,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    if not done:
        raise FailedPrecondition(f"the agent's library in '{folder}' cannot be compiled: is there space left?")
    if not keep_sources:
        for source in folder.rglob("*.py"):
            source.unlink()


def open_to_all(folder: Path, *, programs: AbstractSet[str] = frozenset()) -> None:
    """Whatever the gateway's umask: the agent reads this as another user. ``programs`` can be executed."""
    for current, _, names in os.walk(folder):
        Path(current).chmod(0o755)
        for name in names:
            path = Path(current, name)
            path.chmod(0o755 if str(path.relative_to(folder)) in programs else 0o644)


@contextlib.contextmanager
def draft_beside(target: Path, *, prefix: str) -> Iterator[Path]:
    """A new folder for what is to become ``target`` by one rename. It is removed at the end if it is still there."""
    draft = target.with_name(f"{prefix}new-{secrets.token_hex(4)}")
    draft.mkdir(mode=0o700)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def forget_all(state: Path, *, prefix: str, keep: AbstractSet[str]) -> None:
    """Remove the bundles that are not among ``keep``, and what an interrupted start has left."""
    for path in state.glob(f"{prefix}*"):
        if path.name not in keep:
            shutil.rmtree(path)
