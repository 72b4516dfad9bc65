"""The version of the plugin API, which is not the product's.

A plugin says what it was made for in the one place where its author writes it anyway: its distribution requires
``sandgate-plugin-api~=1.0``. :mod:`sandgate_plugin_api.loading` compares that with what is installed before it imports
anything, because the requirement alone holds only until somebody upgrades the API behind the plugin's back.
"""

from __future__ import annotations

__all__ = ["API_VERSION", "DISTRIBUTION", "VERSION"]

#: The first number of :data:`VERSION`. Raised when a plugin made for the previous one would misbehave.
API_VERSION = 1
#: Of the distribution :data:`DISTRIBUTION`. The second number counts additions that a plugin may need.
VERSION = "1.0.0"
DISTRIBUTION = "sandgate-plugin-api"
