"""What a backend is: it makes, finds again and destroys sandboxes, and says where the agent of each is.

Lifecycle of a backend object: constructed by the core with its context, :meth:`Backend.open` once, then any number of
concurrent calls, :meth:`Backend.close` once. A backend never sees HTTP, SDKs or records of other sandboxes. It keeps
no truth of its own that the core cannot rebuild: the core stores each :class:`~sandgate_plugin_api.records.Placement`'s
handle, and after a crash asks :meth:`Backend.survey` what exists.

Errors are those of ``sandgate_errors``; anything else counts as a fault of the plugin and reaches clients as "internal".
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sandgate_errors import CapabilityMissing
from sandgate_plugin_api.records import Egress, Placement, SandboxRequest, Survivor, Template, Usage

__all__ = ["AgentFeature", "Backend", "BackendContext", "Capability"]


class Capability(enum.StrEnum):
    """What a backend may offer beyond making and destroying. What it lacks, the core refuses by name."""

    #: Stop all processes and keep them in memory, and let them go on.
    PAUSE = "pause"
    #: End all processes, keep the files and start anew on them.
    PAUSE_FILESYSTEM = "filesystem-only pause"
    #: Keep a copy of a running sandbox's files, and start sandboxes from it.
    SNAPSHOT = "snapshots"
    #: Start sandboxes from the files and the memory of a running one.
    FORK = "fork"
    #: ``allow_internet_access`` False is kept.
    NO_INTERNET = "switching internet access off"
    #: Rules for single addresses and names.
    NETWORK_RULES = "network rules"
    #: ``SandboxRequest.template.resources`` are enforced, also where policy has made them others than the template's.
    LIMITS = "resource limits"


class AgentFeature(enum.StrEnum):
    """What sandgate's own agent gives every sandbox, and an agent that a backend has in its place may lack.

    What it lacks it refuses by name; only numbers and figures have no place for a refusal.
    """

    #: Commands and files under other accounts than one.
    USERS = "acting as other users"
    #: A process is told by the id that the sandbox's own system gave it.
    PIDS = "process ids of the system"
    #: Metadata that is kept with a file.
    METADATA = "metadata of files"
    #: The end of a command's standard input.
    CLOSE_STDIN = "closing the standard input"
    #: Ending all that a command has started, wherever it went.
    KILL_TREE = "ending process trees"
    #: Figures of the sandbox alone, and of its disk; else of the machine, and none.
    USAGE = "measurements of the sandbox alone"


@dataclass(frozen=True, kw_only=True)
class BackendContext:
    """What the core gives a backend."""

    #: A private folder (mode 0700) that survives restarts; no other backend writes there.
    state_dir: Path
    #: A private folder with a short path, for unix sockets: at least 40 more bytes fit into a socket address. Survives
    #: a restart of the gateway, not necessarily one of the machine.
    runtime_dir: Path
    #: The ``[backends.<name>]`` table of the configuration, unchecked: the backend refuses what it does not know.
    settings: Mapping[str, object] = field(default_factory=dict)


class Backend(abc.ABC):
    """Base class of every backend. All methods run in the core's event loop and must not block it."""

    #: Unique among the installed backends; what ``--backend`` and templates name.
    name: str
    capabilities: frozenset[Capability] = frozenset()
    #: What its sandboxes' agents cannot do; nothing where they are sandgate's own.
    lacks: frozenset[AgentFeature] = frozenset()
    #: True: only the core on the machine where a sandbox was made can reach it. False: any core with the same
    #: configuration can, so another takes over when one dies.
    host_bound: bool = True

    @abc.abstractmethod
    async def open(self) -> None:
        """Check that the backend can work here and get ready.

        Called once, before anything else. Raises :class:`sandgate_errors.FailedPrecondition` with one line that says
        what is missing and how to mend it; the gateway then does not start.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Free what the backend object holds. Sandboxes stay as they are."""

    @abc.abstractmethod
    async def templates(self) -> Sequence[Template]:
        """The templates that exist now. Called on every create; keep it cheap."""

    async def find_template(self, name: str) -> Template | None:
        """The template of an id or an alias; None: this backend has none of that name.

        For a backend whose templates cannot be listed, as with references to images; others need not implement it.
        Called for a name before the sandbox is admitted; may take as long as a create when something must be fetched.
        Raises NotFound (the name is of this backend's kind, and there is no such thing), Unavailable.
        """
        known = await self.templates()
        by_id = (template for template in known if template.id == name)
        by_alias = (template for template in known if name in template.aliases)
        return next(by_id, None) or next(by_alias, None)

    @abc.abstractmethod
    def reserve(self, request: SandboxRequest) -> Mapping[str, object]:
        """The handle under which this sandbox can be found again, before anything is made.

        The core stores it and then calls :meth:`create`; after a crash in between, :meth:`destroy` with this handle
        must find whatever was made. Pure: no I/O.
        """

    @abc.abstractmethod
    async def create(self, request: SandboxRequest, handle: Mapping[str, object]) -> Placement:
        """Start one sandbox and return once its agent accepts connections.

        Called at most once per ``request.sandbox_id``, with what :meth:`reserve` gave. The returned handle replaces it.
        Cancelled or failed: frees whatever it had started before the exception leaves.
        Raises ResourceExhausted or Unavailable (no capacity; nothing was started), Internal (could not be started; the
        text is for the client, without paths of the host).
        """

    @abc.abstractmethod
    async def locate(self, handle: Mapping[str, object]) -> Placement | None:
        """Where the sandbox of a stored handle is now; None when it does not exist any more.

        Called after a restart of the core, and when an agent stopped answering; never for a paused sandbox. Repeats are
        harmless.
        """

    @abc.abstractmethod
    async def survey(self) -> Sequence[Survivor]:
        """Everything of this gateway that exists: remembered or not, whole or half made, running or paused.

        Called after every start.
        """

    @abc.abstractmethod
    async def destroy(self, handle: Mapping[str, object]) -> None:
        """End the sandbox and free all it held; return when nothing of it is left.

        Idempotent: a handle of something that is gone, half made or unknown is success. Runs to its end even if the
        caller is cancelled.
        """

    async def pause(self, handle: Mapping[str, object], *, memory: bool) -> Mapping[str, object]:
        """Stop the sandbox and keep it until :meth:`resume` or :meth:`destroy`; the returned handle replaces the given.

        ``memory`` True (:attr:`Capability.PAUSE`): its processes keep their memory, pids and open files, and run no
        instruction once this has returned; the agent is stopped like the others. False
        (:attr:`Capability.PAUSE_FILESYSTEM`): its processes have ended when this returns, its files stay.

        May be repeated, as after a crash of the core: for a sandbox that is paused already it is success, also for one
        that was stopped half way. With ``memory`` False on one that is paused with its memory, that memory is given up.
        Failed: the sandbox runs as before. Cancelled: either it runs or it is paused, never in between.

        Raises NotFound (there is no such sandbox any more), Unavailable (it cannot be stopped now).
        """
        raise _missing(self, memory=memory)

    async def resume(self, handle: Mapping[str, object]) -> Placement:
        """Let a paused sandbox run again, and return once its agent accepts connections.

        After a pause with memory everything goes on where it was, the agent included. After one without, the sandbox
        starts anew on its files: another agent, which the core then tells who it is, and another boot id. A sandbox
        that runs is success. Failed or cancelled: it is paused as before.

        Raises NotFound (there is no such sandbox any more), DataLoss (its memory is gone, as after a restart of the
        machine; its files are there, and :meth:`pause` without memory makes it ready to start anew), Unavailable or
        ResourceExhausted (not now).
        """
        raise _missing(self, memory=True)

    async def snapshot(self, handle: Mapping[str, object], *, snapshot_id: str) -> Mapping[str, object]:
        """Keep the files of a running sandbox as they are at one moment (:attr:`Capability.SNAPSHOT`).

        The sandbox goes on; it may stand still while the copy is made. ``snapshot_id`` is unique for all time. Returns
        the snapshot's handle, JSON-able, for :attr:`SandboxRequest.snapshot` and :meth:`delete_snapshot`. A snapshot
        does not depend on its sandbox's life. Failed or cancelled: nothing is kept and the sandbox runs.

        Raises NotFound (no such sandbox any more), ResourceExhausted (no space), Unavailable.
        """
        raise CapabilityMissing.of(self.name, Capability.SNAPSHOT.value)

    async def delete_snapshot(self, snapshot: Mapping[str, object]) -> None:
        """Give up a snapshot. Idempotent. Sandboxes that were started from it are not affected.

        After a crash of the core in the middle of :meth:`snapshot` nobody has its handle: the core then calls this with
        ``{"snapshot_id": ...}``, what it had asked for, and whatever was made under that id, whole or half, goes.
        """
        raise CapabilityMissing.of(self.name, Capability.SNAPSHOT.value)

    async def update_egress(self, handle: Mapping[str, object], egress: Egress) -> None:
        """Replace all rules of a running or paused sandbox (:attr:`Capability.NETWORK_RULES`).

        Holds for new connections when this returns, and over pause and resume. Raises NotFound, Unavailable.
        """
        raise CapabilityMissing.of(self.name, Capability.NETWORK_RULES.value)

    async def usage(self, handle: Mapping[str, object]) -> Usage | None:
        """What a running sandbox uses; None: its agent measures as well as the backend could. Every 5 s per sandbox.

        Where :attr:`Capability.LIMITS` is claimed, the totals are the sandbox's limits. Raises NotFound, Unavailable.
        """
        return None

    async def address(self, handle: Mapping[str, object]) -> str | None:
        """The IP address that a sandbox has for itself alone, for those who describe it; None: it has none now.

        Raises NotFound, Unavailable.
        """
        return None

    @classmethod
    def diagnose(cls, settings: Mapping[str, object]) -> Sequence[tuple[str, bool, str]]:
        """What ``sandgate doctor`` prints: (what, works, how it is or how to mend it). May take a second; blocks."""
        return ()


def _missing(backend: Backend, *, memory: bool) -> CapabilityMissing:
    capability = Capability.PAUSE if memory else Capability.PAUSE_FILESYSTEM
    return CapabilityMissing.of(backend.name, capability.value)
