"""The part of Python's standard library that goes into a portable bundle.

Everything is taken but what no agent can need: a list of what is left out may be too short, which costs some space, while a
list of what is taken in could be, and a sandbox would find out in the middle of a call.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from sandgate_errors import FailedPrecondition

__all__ = ["extensions", "folder_name", "modules"]

_LEFT_OUT = frozenset(
    name
    for names in (
        # Tests and what tests are written with.
        "test tests idlelib unittest doctest _ctypes_test xxlimited xxlimited_35 _xxtestfuzz _xxsubinterpreters",
        "_testbuffer _testcapi _testclinic _testexternalinspection _testimportmultiple _testinternalcapi _testlimitedcapi",
        "_testmultiphase _testsinglephase _xxinterpchannels",
        # Windows on a screen, terminals for people.
        "tkinter _tkinter turtle turtledemo curses _curses _curses_panel readline rlcompleter _pyrepl",
        # Building, installing and taking apart programs.
        "distutils ensurepip lib2to3 venv pydoc pydoc_data pdb bdb cProfile profile pstats trace pickletools zipapp",
        "modulefinder site-packages dist-packages",
        # Servers, clients and databases; TLS is gRPC's own.
        "_hashlib _ssl ssl sqlite3 _sqlite3 dbm _dbm _gdbm wsgiref xmlrpc smtplib smtpd imaplib poplib nntplib telnetlib",
        "ftplib mailbox mailcap cgi cgitb webbrowser antigravity this",
        # Sound, and compression that nothing here uses.
        "ossaudiodev audioop aifc sunau chunk wave sndhdr imghdr nis lzma _lzma bz2 _bz2 _zstd",
    )
    for name in names.split()
)


def folder_name() -> str:
    """Where this interpreter looks for it, below the folder that holds its ``bin``."""
    return f"{sys.platlibdir}/{_folder().name}"


def modules() -> dict[str, Path]:
    """Place in that folder to the module or package that belongs there."""
    found = {
        entry.name: entry
        for entry in _folder().iterdir()
        if _is_wanted(entry.name) and (entry.suffix == ".py" or (entry / "__init__.py").is_file())
    }
    if "os.py" not in found:
        raise FailedPrecondition(f"the standard library in '{_folder()}' has no sources: install Python with them")
    return found


def extensions() -> dict[str, Path]:
    """The same for compiled modules, in ``lib-dynload``."""
    folder = Path(sysconfig.get_config_var("DESTSHARED") or _folder() / "lib-dynload")
    if not folder.is_dir():
        # An interpreter that has them all within itself.
        return {}
    return {f"lib-dynload/{entry.name}": entry for entry in folder.glob("*.so") if _is_wanted(entry.name)}


def _folder() -> Path:
    # Not by sysconfig's scheme, which distributions bend: it is where a module of it was loaded from.
    return Path(os.__file__).parent


def _is_wanted(name: str) -> bool:
    stem = name.partition(".")[0]
    return stem not in _LEFT_OUT and not stem.startswith(("config-", "_sysconfigdata", "__phello"))
