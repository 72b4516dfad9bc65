"""Sends templates to backends by weight: the hooks of the plugin ``weighted``.

The core calls :func:`sandgate_configure` once and :func:`sandgate_create_request` for every create. Here a create only gets an
order of backends; trying them one after the other is the gateway's.
"""

from __future__ import annotations

import dataclasses

from sandgate_errors import FailedPrecondition
from sandgate_plugin_api import NewSandbox, PolicyContext, hookimpl
from sandgate_plugin_weighted.shares import Shares

__all__ = ["WeightedPlugin", "plugin"]


class WeightedPlugin:
    """An object and not the module holds the hooks, because it has something to remember: whose turn it is."""

    def __init__(self) -> None:
        self._shares = Shares({})

    @hookimpl
    async def sandgate_configure(self, context: PolicyContext) -> None:
        self._shares = Shares.read(context.settings)
        if context.deployment is None:
            return  # In the edge, where no sandbox is made.
        configured = context.deployment.backends
        if unknown := sorted(self._shares.backends - configured.keys()):
            raise FailedPrecondition(f"weights for backend '{unknown[0]}', which is not configured")

    @hookimpl
    async def sandgate_create_request(self, request: NewSandbox) -> NewSandbox | None:
        order = self._shares.order(request.template)
        return dataclasses.replace(request, backends=order) if order else None


#: What the entry point names.
plugin = WeightedPlugin()
