"""The contract between the sandgate gateway and its plugins.

A plugin is a distribution with an entry point in the group ``sandgate.plugins`` that names a module or object with hook
implementations (:mod:`sandgate_plugin_api.hookspecs`), and that requires ``sandgate-plugin-api~=1.0``
(:mod:`sandgate_plugin_api.version`). A backend plugin registers :class:`Backend` subclasses through the hook
``sandgate_register_backends``; a policy plugin implements hooks that amend, refuse, observe or describe.

Everything a plugin may import stands in ``__all__`` here, and in that of ``sandgate_errors``. A backend is checked by
:mod:`sandgate_plugin_api.testsuite`.
"""

from sandgate_plugin_api.agent_start import agent_command, agent_settings, agent_sockets
from sandgate_plugin_api.backend import (
    AgentFeature,
    Backend,
    BackendContext,
    Capability,
)
from sandgate_plugin_api.hookspecs import HOOK_SECONDS, PROJECT, Registrar, hookimpl
from sandgate_plugin_api.image_names import allows_image
from sandgate_plugin_api.loading import ENTRY_POINT_GROUP
from sandgate_plugin_api.patience import to_its_end
from sandgate_plugin_api.policy import (
    Activity,
    AgentRequest,
    Change,
    Credentials,
    Deployment,
    ListQuery,
    NewLife,
    NewSandbox,
    PolicyContext,
    Reply,
    ReplyKind,
    ResourceLimits,
    RestRequest,
    SandboxInfo,
)
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
from sandgate_plugin_api.settings import refused_settings
from sandgate_plugin_api.version import API_VERSION, VERSION

__all__ = [
    "API_VERSION",
    "ENTRY_POINT_GROUP",
    "HOOK_SECONDS",
    "PROJECT",
    "VERSION",
    "Activity",
    "AgentAddress",
    "AgentFeature",
    "AgentRequest",
    "Backend",
    "BackendContext",
    "Capability",
    "Change",
    "Credentials",
    "Deployment",
    "Egress",
    "ListQuery",
    "NewLife",
    "NewSandbox",
    "Placement",
    "PolicyContext",
    "Registrar",
    "Reply",
    "ReplyKind",
    "ResourceLimits",
    "Resources",
    "RestRequest",
    "SandboxInfo",
    "SandboxRequest",
    "Survivor",
    "Template",
    "Usage",
    "agent_command",
    "agent_settings",
    "agent_sockets",
    "allows_image",
    "hookimpl",
    "refused_settings",
    "to_its_end",
]
