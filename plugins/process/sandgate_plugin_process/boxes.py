"""Boxes on disk: what the backend remembers of each sandbox, and where its files are.

::

    <state>/boxes/<box>/record.json   who it is and which processes it has, 0600, written before anything is started
    <state>/boxes/<box>/rootfs/       its root file system (bubblewrap)
    <state>/boxes/<box>/home/, root/  the homes of its accounts (no isolation)
    <state>/boxes/<box>/agent.log     what its agent wrote to standard error
    <state>/boxes/<box>/boot_id       what the sandbox sees as the boot id of its system (bubblewrap)
    <runtime>/<box>/in/               bound into the sandbox: its agent makes the socket here
    <runtime>/<box>/agent.sock        the same socket under a name that the sandbox cannot touch
    <runtime>/<box>/agent.sock.files  likewise, the one on which the agent hands open files over

Each of these sockets has two names of one inode on purpose. Root of a sandbox owns what is bound into it and could put a
symbolic link to any socket of the host in place of its own; whoever dialled that path would then speak to, say, a
container engine with the gateway's rights.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sandgate_errors import Conflict, Internal
from sandgate_plugin_api import AgentAddress, Placement
from sandgate_plugin_process.pids import ProcessId, boot_id
from sandgate_plugin_process.removal import remove_tree

__all__ = ["Box", "Record", "Shelf"]

# A name goes into paths: handles come back from the store, and a store can be edited.
_NAME = re.compile(r"[a-z0-9]{1,40}")
# Of the agent's second socket, behind the name of the first (docs/architecture.md, "Large downloads").
_FILES = ".files"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is known of one box; never secret to the gateway's user, never shown to anybody else."""

    #: Empty: made ahead, nobody's yet.
    sandbox_id: str
    isolation: str
    #: What the agent asks of its callers.
    token: str
    #: Marks the box's own processes among all others; not the box's name, so that no other sandbox can know it.
    mark: str
    boot_id: str
    #: The agent's library folder that this box uses.
    bundle: str
    #: The first of its user and group ids outside; None: it has none of its own.
    base: int | None
    internet: bool
    #: The process that the backend started; None until then.
    main: ProcessId | None = None
    #: The first process of its pid namespace: ends all others with it.
    init: ProcessId | None = None
    #: What a pause has kept, or is about to keep; empty: it runs. `copy`: it stands still while its files are copied.
    paused: Literal["", "memory", "files", "copy"] = ""
    #: The control group that can freeze it; None: there is none.
    group: str | None = None
    #: Controller to its group in the hierarchy that limits or counts it; written before these are made.
    groups: Mapping[str, str] = field(default_factory=dict)
    #: What it may use, as its request said: CPUs and MiB. 0: of an earlier version, which limited nothing.
    cpu_count: int = 0
    memory_mb: int = 0
    #: Whether everything that runs in the box is in the group: then nothing can ever be outside of it.
    grouped: bool = False
    #: Processes that its own code had stopped before a pause by signals.
    stopped: frozenset[ProcessId] = frozenset()

    @classmethod
    def fresh(
        cls,
        *,
        sandbox_id: str,
        isolation: str,
        bundle: str,
        base: int | None,
        internet: bool,
        cpu_count: int = 0,
        memory_mb: int = 0,
    ) -> Record:
        return cls(
            sandbox_id=sandbox_id,
            isolation=isolation,
            token=secrets.token_urlsafe(24),
            mark=f"sandgate-{secrets.token_hex(12)}",
            boot_id=boot_id(),
            bundle=bundle,
            base=base,
            internet=internet,
            cpu_count=cpu_count,
            memory_mb=memory_mb,
        )

    def is_alive(self) -> bool:
        """Whether its processes are the ones that were started, and run."""
        processes = [process for process in (self.main, self.init) if process is not None]
        return bool(processes) and self.boot_id == boot_id() and all(process.is_alive() for process in processes)

    def claimed(self, sandbox_id: str) -> Record:
        return replace(self, sandbox_id=sandbox_id)

    def started(self, *, main: ProcessId, init: ProcessId | None = None, grouped: bool = False) -> Record:
        return replace(self, main=main, init=init, grouped=grouped)

    def ended(self) -> Record:
        """Only its files are left."""
        return replace(
            self,
            main=None,
            init=None,
            paused="files",
            group=None,
            groups={},
            grouped=False,
            stopped=frozenset(),
            boot_id=boot_id(),
        )

    @classmethod
    def parse(cls, text: bytes) -> Record:
        """Raises ValueError for anything that :meth:`dump` did not write."""
        try:
            fields: dict[str, Any] = json.loads(text)
            for name in ("main", "init"):
                fields[name] = None if fields[name] is None else ProcessId(**fields[name])
            fields["stopped"] = frozenset(ProcessId(**process) for process in fields.get("stopped", ()))
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError("not a record of a box") from error

    def dump(self) -> bytes:
        return json.dumps({**asdict(self), "stopped": [asdict(process) for process in self.stopped]}).encode()


@dataclass(frozen=True)
class Box:
    """The places of one box; none of them need exist."""

    name: str
    folder: Path
    runtime: Path

    @property
    def rootfs(self) -> Path:
        return self.folder / "rootfs"

    @property
    def log(self) -> Path:
        return self.folder / "agent.log"

    @property
    def socket(self) -> Path:
        return self.runtime / "agent.sock"

    @property
    def inner_socket_folder(self) -> Path:
        return self.runtime / "in"

    @property
    def boot_id(self) -> Path:
        return self.folder / "boot_id"

    @property
    def _record(self) -> Path:
        return self.folder / "record.json"

    @property
    def handle(self) -> Mapping[str, object]:
        return {"box": self.name}

    def exists(self) -> bool:
        return self.folder.exists() or self.runtime.exists()

    def make(self, record: Record) -> None:
        """The empty box with its record. Raises Conflict when there is one of that name."""
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError:
            raise Conflict("this sandbox is being made already") from None
        # Without a folder beside it, a socket folder of that name is the rest of an interrupted removal.
        self.renew(record)

    def renew(self, record: Record) -> None:
        """The record, and an empty socket folder: a new agent makes a new socket. Nothing of the box may run."""
        self.write(record)
        remove_tree(self.runtime)
        self.runtime.mkdir(mode=0o700)

    def read(self) -> Record | None:
        """The record; None when there is none or it cannot be read, as when the machine went down in the middle."""
        try:
            return Record.parse(self._record.read_bytes())
        except (OSError, ValueError):
            return None

    def write(self, record: Record) -> None:
        """Replace the record as a whole."""
        draft = self.folder / "record.new"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(record.dump())
        draft.rename(self._record)

    def show_socket(self, *, seal: bool) -> None:
        """Give the agent's socket its outer name; ``seal`` closes the inner folder to the sandbox's root.

        Sealing also keeps a sandbox from filling the file system of the runtime folder, often a small one in memory.
        """
        if not self._show(""):
            raise Internal("the sandbox's agent made no socket")
        # The one on which it hands files over may be missing, as with an agent of an earlier version.
        with contextlib.suppress(FileNotFoundError):
            self._show(_FILES)
        if seal:
            os.chown(self.inner_socket_folder, 0, 0)
            self.inner_socket_folder.chmod(0o755)

    def _show(self, suffix: str) -> bool:
        """Whether it is a socket. Raises FileNotFoundError."""
        shown = self.socket.with_name(f"{self.socket.name}{suffix}")
        os.link(self.inner_socket_folder / f"agent.sock{suffix}", shown, follow_symlinks=False)
        # Looked at under its new name, which nobody else can give to something else.
        if stat.S_ISSOCK(shown.lstat().st_mode):
            return True
        shown.unlink()
        return False

    def placement(self, record: Record) -> Placement:
        return Placement(handle=self.handle, agent=AgentAddress(target=f"unix:{self.socket}", token=record.token))

    def remove(self) -> None:
        """Remove all its files; nothing of it may run any more. The record goes last but for its folder."""
        remove_tree(self.runtime)
        remove_tree(self.folder)


class Shelf:
    """All boxes of one gateway."""

    def __init__(self, *, state: Path, runtime: Path) -> None:
        self._boxes = state / "boxes"
        self._runtime = runtime

    def open(self) -> None:
        self._boxes.mkdir(mode=0o700, exist_ok=True)

    def box(self, name: str) -> Box:
        if _NAME.fullmatch(name) is None:
            raise Internal("the handle of the sandbox is damaged")
        return Box(name, self._boxes / name, self._runtime / name)

    def all(self) -> Iterator[Box]:
        """Every box of which anything is left, also where only a socket folder is."""
        names = {entry.name for folder in (self._boxes, self._runtime) for entry in folder.iterdir() if entry.is_dir()}
        return (self.box(name) for name in sorted(names) if _NAME.fullmatch(name))

    def find(self, handle: Mapping[str, object]) -> Box | None:
        """The box of a handle: by its name, else by the sandbox it was claimed for.

        The second way is for a crash right after a claim: the store then still has the handle that was reserved, which
        carries the sandbox's id, while the box was made ahead under a name of its own.
        """
        name = handle.get("box")
        if not isinstance(name, str):
            raise Internal("the handle of the sandbox is damaged")
        box = self.box(name)
        if box.exists():
            return box
        return next((other for other in self.all() if (r := other.read()) is not None and r.sandbox_id == name), None)
