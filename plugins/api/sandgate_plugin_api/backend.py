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
from sandgate_plugin_api.records import Placement, SandboxRequest, Survivor, Template

__all__ = ["Backend", "BackendContext", "Capability"]


class Capability(enum.StrEnum):
    """What a backend may offer beyond making and destroying. What it lacks, the core refuses by name."""

    #: Stop all processes and keep them in memory, and let them go on.
    PAUSE = "pause"
    #: End all processes, keep the files and start anew on them.
    PAUSE_FILESYSTEM = "filesystem-only pause"
    SNAPSHOT = "snapshots"
    FORK = "fork"
    #: ``allow_internet_access`` False is kept.
    NO_INTERNET = "switching internet access off"
    #: Rules for single addresses and names.
    NETWORK_RULES = "network rules"
    #: ``Template.resources`` are enforced.
    LIMITS = "resource limits"


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

    @classmethod
    def diagnose(cls, settings: Mapping[str, object]) -> Sequence[tuple[str, bool, str]]:
        """What ``sandgate doctor`` prints: (what, works, how it is or how to mend it). May take a second; blocks."""
        return ()


def _missing(backend: Backend, *, memory: bool) -> CapabilityMissing:
    capability = Capability.PAUSE if memory else Capability.PAUSE_FILESYSTEM
    return CapabilityMissing.of(backend.name, capability.value)
