"""The agent's library folder: the agent, its dependencies and this backend's entrance, in one place and read-only.

Made once per content, under a name derived from it, and bound into every sandbox; so a sandbox sees neither the
gateway's environment nor where it is installed, and an upgrade of the gateway does not change the files under the
agents that are running. It runs on the interpreter and libraries of this machine, which these sandboxes see.
``docs/architecture.md``, "The agent's start".
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from pathlib import Path

from sandgate_bundle.packages import compile_all, copy_all, digest, draft_beside, forget_all, open_to_all, packages

__all__ = ["forget", "make"]

_PREFIX = "bundle-"
_INNER_PATH = "/run/sandgate/agent"


def make(state: Path) -> Path:
    """The bundle of what is installed now, made if it is not there yet. Blocks, for about a second the first time."""
    sources = {"__main__.py": Path(__file__).with_name("enter.py"), **packages()}
    target = state / f"{_PREFIX}{digest(sources)}"
    if not target.is_dir():
        with draft_beside(target, prefix=_PREFIX) as draft:
            copy_all(sources, draft)
            compile_all(draft, inner=_INNER_PATH)
            open_to_all(draft)
            draft.rename(target)
    return target


def forget(state: Path, keep: AbstractSet[str]) -> None:
    """Remove the bundles that are not among ``keep``, and what an interrupted start has left."""
    forget_all(state, prefix=_PREFIX, keep=keep)
