"""Hooks that a plugin may implement. pluggy only finds and registers; behaviour lives in classes.

A plugin marks its implementations with :data:`hookimpl`::

    from sandgate_plugin_api import Registrar, hookimpl

    @hookimpl
    def sandgate_register_backends(registrar: Registrar) -> None:
        registrar.add(MyBackend)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from sandgate_plugin_api.backend import Backend

__all__ = ["PROJECT", "Registrar", "hookimpl", "hookspec", "sandgate_register_backends"]

PROJECT = "sandgate"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Registrar(Protocol):
    """Collects what a plugin offers."""

    def add(self, backend: type[Backend]) -> None:
        """Offer a backend class under its ``name``. Raises FailedPrecondition for a name that is taken."""


@hookspec
def sandgate_register_backends(registrar: Registrar) -> None:
    """Add backend classes to ``registrar``.

    Called once for each plugin when the gateway starts, before any backend is opened. Constructing nothing, importing
    little: classes that need heavy libraries import them in ``open``.
    """
