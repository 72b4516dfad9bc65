"""The shared libraries that a program needs, as the system's own loader finds them, and that loader.

The loader knows best: caches, run paths and variants for this processor differ from system to system. Both the one of
the GNU C library and that of musl answer ``--list`` with a line ``name => file (address)`` for each. Which loader it is
stands in the program (System V ABI, "Program Header", PT_INTERP).
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sandgate_errors import FailedPrecondition

__all__ = ["Loader", "loader_of", "needed_by"]

_PT_INTERP = 3
_CLASS_64 = 2
_BIG_ENDIAN = 2
_SHORTEST_HEADER = 52
_FOUND = re.compile(r"^\s+(\S+) => (/.+) \(0x[0-9a-f]+\)$", re.MULTILINE)
_MISSING = re.compile(r"^\s*(\S+) => not found$|^Error loading shared library (\S+):", re.MULTILINE)
#: Loaded by name when they are needed: by the end of a thread, and by look-ups of accounts (before glibc 2.34).
_LOADED_LATER = ("libgcc_s.so.1", "libnss_files.so.2")
_LIST_SECONDS = 30


@dataclass(frozen=True)
class Loader:
    """The program that loads a dynamically linked program."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def options(self, folder: str) -> list[str]:
        """What makes it look for libraries in ``folder``, whatever the system around it has."""
        # musl has no cache.
        return [*([] if "musl" in self.name else ["--inhibit-cache"]), "--library-path", folder]


def loader_of(program: Path) -> Loader | None:
    """None: it is linked statically. Raises FailedPrecondition for what is no program of this kind of system."""
    try:
        with program.open("rb") as file:
            interpreter = _interpreter(file.read(64 * 1024))
    except (OSError, struct.error) as error:
        raise FailedPrecondition(f"the interpreter '{program}' cannot be read: {error}") from None
    return None if interpreter is None else Loader(Path(interpreter))


def _interpreter(head: bytes) -> str | None:
    if head[:4] != b"\x7fELF" or len(head) < _SHORTEST_HEADER:
        raise FailedPrecondition("the interpreter is no ELF program")
    order = ">" if head[5] == _BIG_ENDIAN else "<"
    wide = head[4] == _CLASS_64
    (table,) = struct.unpack_from(f"{order}{'Q' if wide else 'I'}", head, 32 if wide else 28)
    size, count = struct.unpack_from(f"{order}HH", head, 54 if wide else 42)
    for place in range(table, table + size * count, size):
        (kind,) = struct.unpack_from(f"{order}I", head, place)
        if kind == _PT_INTERP:
            offset, length = _extent(head, place, order=order, wide=wide)
            return os.fsdecode(head[offset : offset + length].rstrip(b"\0"))
    return None


def _extent(head: bytes, place: int, *, order: str, wide: bool) -> tuple[int, int]:
    """Offset and size in the file of what a program header describes."""
    if wide:
        offset, _, _, length = struct.unpack_from(f"{order}QQQQ", head, place + 8)
    else:
        offset, _, _, length = struct.unpack_from(f"{order}IIII", head, place + 4)
    return offset, length


def needed_by(loader: Loader, files: Iterable[Path]) -> dict[str, Path]:
    """Names by which libraries are looked for to the files that are found, for all ``files`` together.

    Where two need different files of one name the first has it: in one process only one of them is ever loaded.
    """
    found: dict[str, Path] = {}
    for file in files:
        for name, path in _list(loader, file).items():
            found.setdefault(name, path)
    for folder in dict.fromkeys(path.parent for path in found.values()):
        for name in _LOADED_LATER:
            if (folder / name).is_file():
                found.setdefault(name, folder / name)
    # As a library it is listed like any other, but it comes under its own name.
    found.pop(loader.name, None)
    return found


def _list(loader: Loader, file: Path) -> dict[str, Path]:
    command = [str(loader.path), "--list", str(file)]
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, timeout=_LIST_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FailedPrecondition(f"the loader '{loader.path}' does not list libraries: {error}") from None
    text = os.fsdecode(done.stdout + done.stderr)
    if missing := _MISSING.search(text):
        raise FailedPrecondition(f"'{file}' needs the library '{missing[1] or missing[2]}', which is not installed")
    return {name: Path(path) for name, path in _FOUND.findall(text)}
