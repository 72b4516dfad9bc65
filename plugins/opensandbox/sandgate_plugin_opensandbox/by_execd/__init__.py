"""Sandboxes without an agent of ours in them: commands and files by execd alone (``execd_only``).

For images, architectures and policies that let no agent in. The agent's services run in the gateway's core instead, and have
execd do what the system does for them inside a sandbox; docs/backends/opensandbox.md says what is missing then.
"""

from sandgate_plugin_opensandbox.by_execd.agent import FarAgents
from sandgate_plugin_opensandbox.by_execd.starting import ExecdStarter

__all__ = ["ExecdStarter", "FarAgents"]
