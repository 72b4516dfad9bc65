"""What a backend puts into a sandbox to run the agent there: its packages, or those with all they need to run anywhere.

``packages``
    The agent and its dependencies, for a sandbox that sees the gateway's own interpreter and C library.
``portable``
    The same with interpreter, standard library, shared libraries and loader, for a sandbox that has nothing.
``standard_library``, ``libraries``
    What of those belongs to the portable bundle.

Backends call this; nothing here runs in a sandbox. ``docs/architecture.md``, "The agent's start".
"""

from sandgate_bundle.portable import MOUNT, UNSET, Bundle, forget_portable, make_portable

__all__ = ["MOUNT", "UNSET", "Bundle", "forget_portable", "make_portable"]
