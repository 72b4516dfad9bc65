"""The process backend: sandboxes are Linux processes behind bubblewrap, or plain ones when asked for by name.

The plugin's one hook registers :class:`ProcessBackend`, as anybody's backend plugin does.
"""

from __future__ import annotations

from sandgate_plugin_api import Registrar, hookimpl

__all__ = ["sandgate_register_backends"]


@hookimpl
def sandgate_register_backends(registrar: Registrar) -> None:
    """Offer the backend ``process``."""
    from sandgate_plugin_process.backend import ProcessBackend

    registrar.add(ProcessBackend)
