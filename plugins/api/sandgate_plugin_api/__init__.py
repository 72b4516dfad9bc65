"""The contract between the sandgate core and its plugins.

A plugin is a distribution with an entry point in the group ``sandgate.plugins`` that names a module or object with hook
implementations (:mod:`sandgate_plugin_api.hookspecs`). A backend plugin registers :class:`Backend` subclasses through the
hook ``sandgate_register_backends``. Everything a plugin may import stands in ``__all__`` here.
"""

from sandgate_plugin_api.backend import (
    Backend,
    BackendContext,
    Capability,
)
from sandgate_plugin_api.hookspecs import PROJECT, Registrar, hookimpl
from sandgate_plugin_api.records import (
    AgentAddress,
    Egress,
    Placement,
    Resources,
    SandboxRequest,
    Survivor,
    Template,
    Usage,
)

__all__ = [
    "API_VERSION",
    "ENTRY_POINT_GROUP",
    "PROJECT",
    "AgentAddress",
    "Backend",
    "BackendContext",
    "Capability",
    "Egress",
    "Placement",
    "Registrar",
    "Resources",
    "SandboxRequest",
    "Survivor",
    "Template",
    "Usage",
    "hookimpl",
]

#: Raised when a plugin written for the previous number would misbehave.
API_VERSION = 1

ENTRY_POINT_GROUP = "sandgate.plugins"
