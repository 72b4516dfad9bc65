"""The OpenSandbox backend: sandboxes are made by an OpenSandbox server, on one machine's Docker or on Kubernetes.

The plugin's one hook registers :class:`OpenSandboxBackend`, as anybody's backend plugin does.
"""

from __future__ import annotations

from sandgate_plugin_api import Registrar, hookimpl

__all__ = ["sandgate_register_backends"]


@hookimpl
def sandgate_register_backends(registrar: Registrar) -> None:
    """Offer the backend ``opensandbox``."""
    from sandgate_plugin_opensandbox.backend import OpenSandboxBackend

    registrar.add(OpenSandboxBackend)
