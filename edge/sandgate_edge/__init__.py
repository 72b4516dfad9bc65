"""The edge: translates E2B REST, Connect and file transfer into gRPC. Holds no state that matters.

A program, not a library: ``python -m sandgate_edge`` is its one way in.
"""

from __future__ import annotations

__all__: list[str] = []
