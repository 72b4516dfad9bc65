"""What a sandbox's rules say about requests to its ports: who may make them, and as which host they arrive (R8, R10, R11).

The edge acts on it; here it is checked when the sandbox is made, so that a rule which nobody could follow is never kept.
"""

from __future__ import annotations

import re

from sandgate_core.records import NetworkRules
from sandgate_errors import InvalidArgument

__all__ = ["check_ingress"]

_LONGEST_HOST = 253
_LABEL = r"[a-z0-9](?:[a-z0-9_-]{0,61}[a-z0-9])?"
# A name, an IPv4 address or an IPv6 address in brackets; with or without a port (RFC 9110 section 7.2).
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-f:.]+\])(?::[0-9]{{1,5}})?", re.ASCII | re.IGNORECASE)
_PORT = "${PORT}"
_LONGEST_PORT = "65535"


def check_ingress(rules: NetworkRules, *, secure: bool) -> None:
    """Raises InvalidArgument."""
    if rules.allow_public_traffic is False and not secure:
        raise InvalidArgument("allowPublicTraffic false needs a secured sandbox")
    mask = rules.mask_request_host
    host = mask.replace(_PORT, _LONGEST_PORT)
    if mask and (len(host) > _LONGEST_HOST or not _HOST.fullmatch(host)):
        raise InvalidArgument(
            f"maskRequestHost must be a host name or address, with or without a port; {_PORT} stands for the port"
        )
