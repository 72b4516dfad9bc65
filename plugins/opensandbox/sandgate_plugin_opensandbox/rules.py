"""What the rules of a sandbox's network are in the words of OpenSandbox's egress sidecar."""

from __future__ import annotations

from sandgate_plugin_api import Egress

__all__ = ["policy"]

_EVERYTHING = frozenset({"0.0.0.0/0", "::/0"})
#: Private, shared, link-local (cloud metadata) and unique local ranges: closed whatever a client says.
_PRIVATE = (
    "10.0.0.0/8",
    "100.64.0.0/10",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "fc00::/7",
    "fe80::/10",
)


def policy(egress: Egress) -> dict[str, object]:
    """The body of ``networkPolicy``: rules in order, the first that fits decides."""
    if not egress.internet:
        return {"defaultAction": "deny", "egress": []}
    closed = bool(_EVERYTHING & set(egress.deny))
    rules = [
        *(("deny", target) for target in _PRIVATE),
        # Allow wins over deny.
        *(("allow", target) for target in egress.allow),
        *(("deny", target) for target in egress.deny if target not in _EVERYTHING),
    ]
    return {
        "defaultAction": "deny" if closed else "allow",
        "egress": [{"action": action, "target": target} for action, target in rules],
    }
