"""The states of a sandbox and the ways between them.

::

    creating --> running --> killing --> killed
        |         |  ^  ^       ^  |
        |         |  |  +-------+  |        (killing is reached from every state that is not ended)
        v         |  |             v
      failed      |  +-- snapshotting     failed
                  v
               pausing --> paused --> resuming --> running

* ``creating``: recorded, being made. Shown to nobody.
* ``running``: takes commands.
* ``pausing``, ``resuming``, ``snapshotting``: an operation is under way; it ends in a resting state or, when it fails, in
  the one it came from.
* ``paused``: kept without running.
* ``killing``: gone for every caller, its resources are being freed. A sandbox stays here until they are: after a failed
  attempt, after a crash of the core.
* ``killed``, ``failed``: ended, nothing is left. Without a way out, so that an ended id never comes back.

A change of state is one compare-and-set in the store (:meth:`sandgate_core.store.Store.move`), made while the sandbox's
lock is held (:mod:`sandgate_core.live`).
"""

from __future__ import annotations

import enum

__all__ = ["TRANSITIONS", "State"]


class State(enum.StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    SNAPSHOTTING = "snapshotting"
    KILLING = "killing"
    KILLED = "killed"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return not TRANSITIONS[self]

    @property
    def shown(self) -> bool:
        """Whether a caller may know of the sandbox (C14)."""
        return self not in _HIDDEN

    @property
    def awake(self) -> bool:
        """Whether the sandbox serves requests of the data plane."""
        return self in _AWAKE


TRANSITIONS: dict[State, frozenset[State]] = {
    State.CREATING: frozenset({State.RUNNING, State.KILLING, State.FAILED}),
    State.RUNNING: frozenset({State.PAUSING, State.SNAPSHOTTING, State.KILLING}),
    State.PAUSING: frozenset({State.PAUSED, State.RUNNING, State.KILLING}),
    State.PAUSED: frozenset({State.RESUMING, State.KILLING}),
    State.RESUMING: frozenset({State.RUNNING, State.PAUSED, State.KILLING}),
    State.SNAPSHOTTING: frozenset({State.RUNNING, State.KILLING}),
    State.KILLING: frozenset({State.KILLED, State.FAILED}),
    State.KILLED: frozenset(),
    State.FAILED: frozenset(),
}
_HIDDEN = frozenset({State.CREATING, State.KILLING, State.KILLED, State.FAILED})
_AWAKE = frozenset({State.RUNNING, State.SNAPSHOTTING})
