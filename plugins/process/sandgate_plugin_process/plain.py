"""No isolation: a box is a folder and a tree of processes, for trusted code where bubblewrap cannot work.

A command can read what the gateway's user can read, and reach its network and processes. What is kept: own homes, and
that destroying a sandbox ends its processes. Without a pid namespace the tree is held together by a keeper
(``enter.py keep``), which adopts orphans; code that wants to can still get away by killing the keeper and the agent.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from sandgate_errors import FailedPrecondition
from sandgate_plugin_process.boxes import Box, Record
from sandgate_plugin_process.isolation import interpreter
from sandgate_plugin_process.pids import ProcessId, descendants, end_all, marked_by, tree, was_given
from sandgate_plugin_process.starting import Descriptor, Joining, Program, Started, start

__all__ = ["Plain"]

_log = logging.getLogger(__name__)

_CHECK_LIMIT_SECONDS = 30.0
_MARK = "SANDGATE_BOX"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Plain:
    """See the module."""

    name = "none"
    can_cut_network = False
    #: Homes are at other paths in each box, and all else is the host's.
    can_copy_files = False
    starts_in_group = False

    def check(self, bundle: Path, private: Sequence[Path]) -> None:
        del private
        try:
            done = subprocess.run(
                [*_python(bundle), "probe", "keep"],
                capture_output=True,
                text=True,
                timeout=_CHECK_LIMIT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise FailedPrecondition(f"the agent's interpreter cannot be started: {error}") from None
        if '"ready": true' not in done.stdout:
            said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
            raise FailedPrecondition(f"the agent's library does not work: {said}")
        _log.warning(
            "isolation is 'none': code in a sandbox can read and change whatever user id %d can; trusted code only",
            os.geteuid(),
        )

    def base_for(self, taken: set[int]) -> int | None:
        del taken
        return None

    def furnish(self, box: Box, record: Record) -> None:
        del record
        for home in _homes(box).values():
            home.mkdir(mode=0o700)

    def mend(self, box: Box, record: Record) -> None:
        """Nothing is mounted, and nothing done in the homes but by the account that owns them."""

    def connect(self, box: Box, record: Record) -> None:
        """There is none without network."""

    def root(self, box: Box) -> Path:
        del box
        return Path("/")

    def members(self, record: Record) -> list[ProcessId]:
        return tree(({record.main} if record.main is not None else set()) | marked_by(was_given(_given(record))))

    def processes_by_rlimit(self) -> str:
        """It would count all processes of the gateway's user together."""
        return ""

    def start(self, box: Box, record: Record, *, bundle: Path, joining: Joining, processes: int | None) -> Started:
        python = _python(bundle)
        return start(
            Program(
                executable=python[0],
                argv=[*python, "--join", Descriptor.JOINED, "--groups", Descriptor.GROUPS, "keep"],
                env={"PATH": os.environ.get("PATH", _PATH), "LANG": "C.UTF-8", _MARK: record.mark},
            ),
            first_line={
                "listen": f"unix:{box.inner_socket_folder.parent}/agent.sock",
                "token": record.token,
                "identity": "same",
                "accounts": {name: {"home": str(home)} for name, home in _homes(box).items()},
                "system_files": False,
                "measured": record.groups,
                "processes": processes,
            },
            log=box.log,
            joining=joining,
        )

    def agent_is_up(self, box: Box) -> None:
        """The agent made the socket where it is dialled: there is nobody to hide it from."""

    def end(self, record: Record) -> None:
        """The keeper last: it adopts those whose parents end."""
        keeper = record.main
        roots = {keeper} if keeper is not None else set[ProcessId]()
        given = was_given(_given(record))
        # Marked ones are roots too: the keeper may be gone, or never have been recorded.
        end_all(lambda: descendants(roots | marked_by(given)), last=keeper)


def _python(bundle: Path) -> list[str]:
    return [str(interpreter()), "-I", "-S", "-X", "utf8", str(bundle)]


def _given(record: Record) -> str:
    return f"{_MARK}={record.mark}"


def _homes(box: Box) -> dict[str, Path]:
    homes = {"user": box.folder / "home"}
    if os.geteuid() == 0:
        homes["root"] = box.folder / "root"
    return homes
