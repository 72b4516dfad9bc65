"""Where connections from inside a sandbox may go: a client's rules, checked, and what they mean for a backend (C54, C55).

Clients write two lists and a switch. Allow wins over deny, and the switch being off is the same as to deny all, so rules
that say the same in other words need the same of a backend: none for "everywhere", being cut off for "nowhere", rules for
anything between. Private and link-local ranges are the backend's to block, whatever stands here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from sandgate_core.records import NetworkRules
from sandgate_errors import InvalidArgument
from sandgate_plugin_api import Capability, Egress

__all__ = ["check_rules", "egress_of", "needed_for"]

#: Entries of one list. Each is a rule that every new connection is held against, and all are in every answer about it.
_MOST_ENTRIES = 256
#: RFC 1035: of a name, and of each of its labels.
_LONGEST_NAME = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_ALL = ipaddress.ip_network("0.0.0.0/0")
_ALL_6 = ipaddress.ip_network("::/0")
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def check_rules(*, allow: Sequence[str], deny: Sequence[str], internet: bool) -> None:
    """Raises InvalidArgument for rules that cannot be kept as they are written."""
    for name, entries in (("allowOut", allow), ("denyOut", deny)):
        if len(entries) > _MOST_ENTRIES:
            raise InvalidArgument(f"{name} may have at most {_MOST_ENTRIES} entries")
    for entry in deny:
        if _network_of(entry) is None:
            raise InvalidArgument(f"denyOut may hold addresses and ranges only, not '{entry[:100]}'")
    names = [entry for entry in allow if _network_of(entry) is None]
    for entry in names:
        if not _is_name(entry):
            raise InvalidArgument(f"allowOut may hold addresses, ranges and domain names only, not '{entry[:100]}'")
    if names and internet and not _denies_all(deny):
        # All else stays open otherwise, and to allow one name would change nothing.
        raise InvalidArgument("a domain name in allowOut needs all else to be denied: add '0.0.0.0/0' to denyOut")


def egress_of(rules: NetworkRules | None, *, internet: bool) -> Egress:
    """What a backend is told; the same for all ways to write the same rules."""
    allow = () if rules is None else rules.allow_out
    deny = () if rules is None else rules.deny_out
    if not internet:
        deny = (*deny, str(_ALL))
    if _denies_all(deny):
        # The kernel keeps the two kinds of address apart, and "all" means both.
        deny = (*dict.fromkeys((*deny, str(_ALL), str(_ALL_6))),)
    if not deny:
        return Egress()
    if not allow and _denies_all(deny):
        return Egress(internet=False)
    return Egress(allow=_canonical(allow), deny=_canonical(deny))


def needed_for(egress: Egress) -> Capability | None:
    """What a backend must offer to keep it; None: nothing."""
    if egress.open:
        return None
    return Capability.NETWORK_RULES if egress.internet else Capability.NO_INTERNET


def _network_of(entry: str) -> _Network | None:
    # A zone (`fe80::1%eth0`) names an interface of the sandbox's host, which is none of a client's business.
    if "%" in entry:
        return None
    try:
        return ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return None


def _is_name(entry: str) -> bool:
    labels = entry.lower().removeprefix("*.").removesuffix(".").split(".")
    # What ends in a number is an address that was mistyped (RFC 3696 2).
    return len(entry) <= _LONGEST_NAME and all(map(_LABEL.fullmatch, labels)) and not labels[-1].isdigit()


def _denies_all(deny: Sequence[str]) -> bool:
    return any(_network_of(entry) == _ALL for entry in deny)


def _canonical(entries: Sequence[str]) -> tuple[str, ...]:
    written = (
        str(network) if (network := _network_of(entry)) else entry.lower().removesuffix(".") for entry in entries
    )
    return tuple(dict.fromkeys(written))
