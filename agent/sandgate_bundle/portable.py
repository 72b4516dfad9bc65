"""The portable bundle: one read-only folder from which the agent runs in any Linux system of the same processor.

::

    <state>/portable-<hash>
        manifest.json                  what it was made from, and the SHA-256 of each file
        root                           what sandboxes see
            bin/python3                the interpreter that runs the gateway
            lib/ld-linux-x86-64.so.2   its loader, which starts it: what the image has, or has not, is never asked
            lib/*.so*                  the shared libraries of everything here
            lib/python3.N              the standard library, trimmed and compiled
            agent                      the agent's packages, and a ``__main__`` that the backend may choose

It is named after what it was made from, so an upgrade of the gateway, of Python or of the C library makes another, and a
gateway never starts an older agent than its own. Each start of a gateway compares every file with the manifest: a damaged
one is replaced in its place, as sandboxes that run may have the folder mounted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from sandgate_bundle import standard_library
from sandgate_bundle.libraries import Loader, loader_of, needed_by
from sandgate_bundle.packages import (
    compile_all,
    copy_all,
    digest,
    draft_beside,
    files_of,
    forget_all,
    open_to_all,
    packages,
)
from sandgate_errors import FailedPrecondition

__all__ = ["MOUNT", "UNSET", "Bundle", "forget_portable", "make_portable"]

_log = logging.getLogger(__name__)

#: Where a sandbox has to see the folder: code and tracebacks name it.
MOUNT = "/run/sandgate/bundle"
_PREFIX = "portable-"
#: Variables by which an image would reach into a loader that is not its own. An agent must be started without them.
UNSET = ("GCONV_PATH", "GLIBC_TUNABLES", "LD_AUDIT", "LD_BIND_NOW", "LD_DEBUG", "LD_LIBRARY_PATH", "LD_PRELOAD")
_MANIFEST = "manifest.json"
_ROOT = "root"
_PYTHON = "bin/python3"
_AGENT = "agent"
_ISOLATED = ("-I", "-S", "-X", "utf8")


class _Manifest(TypedDict):
    #: Of the packages and the interpreter.
    key: str
    #: File of this system to its size and time.
    sources: dict[str, str]
    #: File of the bundle to its fingerprint.
    files: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle that is whole."""

    #: To be mounted read-only at :data:`MOUNT`. Every user may read it.
    path: Path
    loader: Loader | None

    @property
    def name(self) -> str:
        """What :func:`forget_portable` knows it by."""
        return self.path.parent.name

    def command(self, *arguments: str) -> list[str]:
        """Program and arguments of the process that becomes the agent, as the sandbox sees them.

        Nothing of it is passed on to what the agent starts: where libraries are is an option here and no variable.
        """
        return [*_start(MOUNT, self.loader), f"{MOUNT}/{_AGENT}", *arguments]


def make_portable(state: Path, *, entrance: Path | None = None) -> Bundle:
    """The bundle of what is installed now, made or mended if need be.

    ``entrance`` is the file that runs as ``__main__``; None: the agent's own. Blocks: some seconds the first time, a few
    tenths of one later. One process at a time may work in ``state``. Raises FailedPrecondition.
    """
    parts = _Parts.of_this_gateway(entrance)
    try:
        current = _current(state, parts)
        if current is None:
            current = _make(state, parts)
        elif damaged := sorted(_damaged(current)):
            _log.warning("the agent's bundle %s is damaged and is mended: %s", current.name, ", ".join(damaged[:5]))
            _mend(current, parts)
    except OSError as error:
        raise FailedPrecondition(f"the agent's bundle cannot be made in '{state}': {error}") from error
    return Bundle(path=current / _ROOT, loader=parts.loader)


def forget_portable(state: Path, *, keep: AbstractSet[str]) -> None:
    """Remove the portable bundles that are not among ``keep``, names of those that sandboxes have mounted."""
    forget_all(state, prefix=_PREFIX, keep=keep)


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What a bundle is made from."""

    interpreter: Path
    loader: Loader | None
    #: Below ``agent``.
    packages: Mapping[str, Path]
    #: Of the packages and the interpreter; what the rest of a bundle was made from stands in its manifest.
    key: str

    @classmethod
    def of_this_gateway(cls, entrance: Path | None) -> _Parts:
        found = packages()
        found["__main__.py"] = entrance or found["sandgate_agent"] / "__main__.py"
        interpreter = _interpreter()
        own = Path(__file__).parent
        key = digest({**found, "interpreter": interpreter, "bundle": own})
        return cls(interpreter=interpreter, loader=loader_of(interpreter), packages=found, key=key)


def _interpreter() -> Path:
    """The program that runs now, and not what a virtual environment or a shim calls it."""
    running = Path("/proc/self/exe").resolve()
    if running.name.startswith("ld-"):
        # Started through a loader, as the agents are.
        running = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    return running


def _start(folder: str, loader: Loader | None) -> list[str]:
    through = [] if loader is None else [f"{folder}/lib/{loader.name}", *loader.options(f"{folder}/lib")]
    return [*through, f"{folder}/{_PYTHON}", *_ISOLATED]


def _current(state: Path, parts: _Parts) -> Path | None:
    """The bundle that was made from just what is here now."""
    for path in sorted(state.glob(f"{_PREFIX}*")):
        manifest = _read_manifest(path)
        if manifest is not None and manifest["key"] == parts.key and _unchanged(manifest["sources"]):
            return path
    return None


def _read_manifest(folder: Path) -> _Manifest | None:
    try:
        manifest: _Manifest = json.loads((folder / _MANIFEST).read_bytes())
        return manifest if manifest.keys() == _Manifest.__annotations__.keys() else None
    except (OSError, ValueError, AttributeError):
        # Also what a draft is that was never finished.
        return None


def _unchanged(sources: Mapping[str, str]) -> bool:
    return all(_state_of(Path(path)) == known for path, known in sources.items())


def _state_of(file: Path) -> str:
    try:
        about = file.stat()
    except OSError:
        return ""
    return f"{about.st_size} {about.st_mtime_ns}"


def _damaged(folder: Path) -> Iterator[str]:
    """Files that are not what the manifest says, missing ones, and those that it does not name."""
    manifest = _read_manifest(folder)
    known = {} if manifest is None else manifest["files"]
    present = {str(path.relative_to(folder / _ROOT)) for path in _all_files(folder / _ROOT)}
    yield from present ^ known.keys()
    yield from (name for name in present & known.keys() if _fingerprint(folder / _ROOT / name) != known[name])


def _all_files(folder: Path) -> Iterator[Path]:
    for current, folders, names in os.walk(folder):
        yield from (Path(current, name) for name in names)
        # Nothing here is a link; one to a folder would hide from a walk.
        yield from (path for name in folders if (path := Path(current, name)).is_symlink())


def _fingerprint(file: Path) -> str:
    """Content, and whether everybody can read and nobody change it."""
    if file.is_symlink() or not file.is_file():
        return ""
    with file.open("rb") as content:
        return f"{hashlib.file_digest(content, 'sha256').hexdigest()} {file.stat().st_mode & 0o7777:o}"


def _make(state: Path, parts: _Parts) -> Path:
    state.mkdir(parents=True, exist_ok=True)
    with draft_beside(state / _PREFIX, prefix=_PREFIX) as draft:
        manifest = _fill(draft, parts)
        about = json.dumps([parts.key, manifest["sources"]], sort_keys=True)
        target = state / f"{_PREFIX}{hashlib.sha256(about.encode()).hexdigest()[:16]}"
        if target.exists():
            # Made from the same, and yet not known for it: its manifest is damaged.
            _replace(target, draft, manifest)
        else:
            draft.rename(target)
    return target


def _mend(folder: Path, parts: _Parts) -> None:
    with draft_beside(folder, prefix=_PREFIX) as draft:
        _replace(folder, draft, _fill(draft, parts))
    if still := sorted(_damaged(folder)):
        raise FailedPrecondition(f"the agent's bundle '{folder}' cannot be mended: {still[0]}")


def _replace(folder: Path, draft: Path, manifest: _Manifest) -> None:
    """Put what the draft has in other content into the place of the old, file by file, and take away what it has not."""
    root = folder / _ROOT
    root.mkdir(exist_ok=True)
    for path in [*_all_files(root)]:
        if str(path.relative_to(root)) not in manifest["files"]:
            path.unlink()
    for name, fingerprint in manifest["files"].items():
        if _fingerprint(root / name) != fingerprint:
            _put(draft / _ROOT / name, root / name)
    for current, _, _ in os.walk(root):
        Path(current).chmod(0o755)
    (draft / _MANIFEST).replace(folder / _MANIFEST)


def _put(new: Path, old: Path) -> None:
    if old.is_dir():
        shutil.rmtree(old)
    old.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    new.replace(old)


def _fill(draft: Path, parts: _Parts) -> _Manifest:
    """Build it, and return the manifest that is written last of all."""
    root = draft / _ROOT
    root.mkdir()
    library = standard_library.folder_name()
    modules = standard_library.modules()
    copies = {
        _PYTHON: parts.interpreter,
        **{f"{library}/{place}": path for place, path in standard_library.extensions().items()},
    }
    libraries = _libraries(parts, copies)
    copy_all({f"{library}/{place}": path for place, path in modules.items()}, root)
    copy_all({f"{_AGENT}/{place}": path for place, path in parts.packages.items()}, root)
    copy_all({**copies, **libraries}, root)
    # By which the interpreter knows where it is, also one that has no such modules.
    (root / library / "lib-dynload").mkdir(exist_ok=True)
    compile_all(root, inner=MOUNT, keep_sources=False)
    open_to_all(root, programs={_PYTHON, *([] if parts.loader is None else [f"lib/{parts.loader.name}"])})
    outside = [*copies.values(), *libraries.values(), *(file for path in modules.values() for file in files_of(path))]
    manifest: _Manifest = {
        "key": parts.key,
        "sources": {str(path): _state_of(path) for path in outside},
        "files": {str(file.relative_to(root)): _fingerprint(file) for file in sorted(_all_files(root))},
    }
    (draft / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    return manifest


def _libraries(parts: _Parts, copies: Mapping[str, Path]) -> dict[str, Path]:
    """Place to file: what the interpreter and every compiled module need, and the loader."""
    if parts.loader is None:
        return {}
    # Modules of the packages are listed where they are installed, as they may look for libraries beside themselves.
    modules = [file for source in parts.packages.values() for file in _compiled(source)]
    found = needed_by(parts.loader, [*copies.values(), *modules])
    return {f"lib/{name}": path for name, path in {**found, parts.loader.name: parts.loader.path}.items()}


def _compiled(source: Path) -> Iterator[Path]:
    yield from source.rglob("*.so") if source.is_dir() else [source] if source.suffix == ".so" else []
