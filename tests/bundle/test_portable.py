"""The portable bundle on the gateway's disk: whole, current, and nothing of this machine in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandgate_bundle import MOUNT, Bundle, forget_portable, make_portable
from sandgate_bundle.libraries import Loader, loader_of, needed_by
from sandgate_errors import FailedPrecondition
from sandgate_testing.requirements import need

ROOT = Path(__file__).resolve().parents[2]
#: Loads what an agent could ever load, also what it would only load on the way.
LOAD_ALL = """
import importlib, pkgutil, sys
for name in ("sandgate_agent", "sandgate_api", "sandgate_errors"):
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
import grpc.aio, google.protobuf.json_format, asyncio, ctypes, logging, traceback, _strptime, encodings.idna
from google.protobuf.internal import api_implementation
grpc.ssl_server_credentials([(b"", b"")])
print(api_implementation.Type(), *sys.path)
"""


def within(bundle: Bundle, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the bundle's interpreter where there is nothing else."""
    need("bubblewrap")
    unprivileged = ["--unshare-user"] if os.geteuid() else []
    program = [word for word in bundle.command() if word != f"{MOUNT}/agent"]
    mounts = ["--dev", "/dev", "--ro-bind", str(bundle.path), MOUNT]
    sandbox = ["bwrap", *unprivileged, "--unshare-pid", "--clearenv", *mounts]
    return subprocess.run([*sandbox, *program, *words], capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def own(bundle: Bundle, tmp_path: Path) -> Bundle:
    """A bundle that a test may harm."""
    shutil.copytree(bundle.path.parent, tmp_path / bundle.name)
    return make_portable(tmp_path)


def test_everything_that_an_agent_may_load_is_there(bundle: Bundle) -> None:
    program = f"import sys; sys.path.insert(0, '{MOUNT}/agent')\n{LOAD_ALL}"
    done = within(bundle, "-c", program)
    assert done.stderr == ""
    implementation, *search_path = done.stdout.split()
    assert implementation == "upb", "the slow implementation in pure Python"
    assert all(folder.startswith(MOUNT) for folder in search_path)


def test_bundle_is_made_once(own: Bundle, tmp_path: Path) -> None:
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*")}
    assert make_portable(tmp_path) == own
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == before


def test_another_entrance_makes_another_bundle(own: Bundle, tmp_path: Path) -> None:
    """Never older than the gateway: what is installed now decides, and what runs keeps its own."""
    entrance = tmp_path / "enter.py"
    entrance.write_text("print('entered')")
    other = make_portable(tmp_path, entrance=entrance)
    assert other.name != own.name
    assert own.path.is_dir()
    assert within(other, f"{MOUNT}/agent").stdout == "entered\n"
    entrance.write_text("print('entered anew')")
    newer = make_portable(tmp_path, entrance=entrance)
    assert newer.name not in {own.name, other.name}
    assert within(newer, f"{MOUNT}/agent").stdout == "entered anew\n"


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _damage_files(root: Path) -> None:
    _flip(root / "bin/python3")
    next(root.rglob("os.pyc")).unlink()
    shutil.rmtree(root / "agent/grpc")
    (root / "agent/sitecustomize.py").write_text("raise SystemExit")
    (root / "agent/strange").symlink_to("/etc")
    (root / "agent/__main__.pyc").chmod(0o600)


DAMAGES = {
    "files": _damage_files,
    "an empty manifest": lambda root: (root.parent / "manifest.json").write_text(""),
    "everything": lambda root: [shutil.rmtree(path) for path in root.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_bundle_is_whole_again_in_its_place(damage: str, own: Bundle, tmp_path: Path) -> None:
    """Sandboxes that run have the folder mounted: it must stay the same one."""
    folder = own.path.stat().st_ino
    DAMAGES[damage](own.path)
    mended = make_portable(tmp_path)
    assert mended == own
    assert own.path.stat().st_ino == folder
    assert not list(own.path.rglob("sitecustomize*"))
    assert within(mended, "-c", f"import sys; sys.path.insert(0, '{MOUNT}/agent')\n{LOAD_ALL}").stderr == ""


def test_undamaged_files_stay_what_runs_has_open(own: Bundle, tmp_path: Path) -> None:
    before = (own.path / "lib").stat(), (own.path / "bin/python3").stat().st_ino
    _flip(own.path / "agent/__main__.pyc")
    make_portable(tmp_path)
    assert (own.path / "bin/python3").stat().st_ino == before[1]


def test_interrupted_making_is_no_bundle_and_is_forgotten(own: Bundle, tmp_path: Path) -> None:
    draft = tmp_path / "portable-new-0123"
    shutil.copytree(own.path.parent, draft)
    (draft / "manifest.json").unlink()
    assert make_portable(tmp_path) == own
    forget_portable(tmp_path, keep={own.name})
    assert [path.name for path in tmp_path.iterdir()] == [own.name]


def test_everybody_can_read_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        bundle = make_portable(tmp_path / "state")
    finally:
        os.umask(before)
    modes = {path.relative_to(bundle.path): path.stat().st_mode & 0o7777 for path in bundle.path.rglob("*")}
    wrong = {str(path): oct(mode) for path, mode in modes.items() if mode not in {0o644, 0o755}}
    assert wrong == {}
    assert {str(path) for path, mode in modes.items() if mode == 0o755 and not (bundle.path / path).is_dir()} == {
        "bin/python3",
        *([f"lib/{bundle.loader.name}"] if bundle.loader is not None else []),
    }


def test_compiled_code_says_nothing_of_where_the_gateway_lives(bundle: Bundle) -> None:
    homes = {str(ROOT).encode(), str(Path(os.__file__).parent).encode(), sys.prefix.encode()}
    told = [path for path in bundle.path.rglob("*.pyc") if any(home in path.read_bytes() for home in homes - {b"/usr"})]
    assert told == []
    assert list(bundle.path.rglob("*.py")) == []


def test_disk_that_is_full_is_one_line_for_the_operator(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder has to be")
    with pytest.raises(FailedPrecondition, match="cannot be made"):
        make_portable(tmp_path / "state")


def test_interpreter_without_a_loader_starts_by_itself(tmp_path: Path) -> None:
    static = Bundle(path=tmp_path, loader=None)
    assert static.command("a") == [f"{MOUNT}/bin/python3", "-I", "-S", "-X", "utf8", f"{MOUNT}/agent", "a"]


def test_loader_of_musl_has_no_cache_to_be_kept_from() -> None:
    assert Loader(Path("/lib/ld-musl-x86_64.so.1")).options("/l") == ["--library-path", "/l"]
    assert Loader(Path("/lib64/ld-linux-x86-64.so.2")).options("/l") == ["--inhibit-cache", "--library-path", "/l"]


def _header(*, wide: bool, order: str, interpreter: bytes) -> bytes:
    """A program of one header that names its loader, as the System V ABI lays it out."""
    import struct

    size = 64 if wide else 52
    place = size + (56 if wide else 32)
    ident = b"\x7fELF" + bytes([2 if wide else 1, 1 if order == "<" else 2, 1]) + bytes(9)
    word = "Q" if wide else "I"
    head = struct.pack(f"{order}HHI{word}{word}{word}IHHHHHH", 2, 62, 1, 0, size, 0, 0, size, place - size, 1, 0, 0, 0)
    if wide:
        program = struct.pack(f"{order}IIQQQQQQ", 3, 4, place, 0, 0, len(interpreter), len(interpreter), 1)
    else:
        program = struct.pack(f"{order}IIIIIIII", 3, place, 0, 0, len(interpreter), len(interpreter), 4, 1)
    return ident + head + program + interpreter


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("wide", [True, False])
def test_loader_is_read_from_programs_of_every_kind(wide: bool, order: str, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(_header(wide=wide, order=order, interpreter=b"/lib/ld-here.so.1\0"))
    assert loader_of(program) == Loader(Path("/lib/ld-here.so.1"))


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF", b"\x7fELF" + bytes(14)])
def test_what_is_no_program_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(content)
    with pytest.raises(FailedPrecondition, match="interpreter"):
        loader_of(tmp_path / "program")


def test_libraries_are_found_as_the_loader_finds_them() -> None:
    interpreter = Path("/proc/self/exe").resolve()
    loader = loader_of(interpreter)
    assert loader is not None
    libraries = needed_by(loader, [interpreter])
    assert loader.name not in libraries
    used = {
        Path(line.split()[-1]).resolve()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/libc." in line
    }
    assert {path.resolve() for name, path in libraries.items() if name.startswith("libc.")} == used
