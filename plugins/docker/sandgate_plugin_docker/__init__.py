"""The Docker backend: sandboxes are containers of any image, on the engine of this machine or of another.

The plugin's one hook registers :class:`DockerBackend`, as anybody's backend plugin does.
"""

from __future__ import annotations

from sandgate_plugin_api import Registrar, hookimpl

__all__ = ["sandgate_register_backends"]


@hookimpl
def sandgate_register_backends(registrar: Registrar) -> None:
    """Offer the backend ``docker``."""
    from sandgate_plugin_docker.backend import DockerBackend

    registrar.add(DockerBackend)
