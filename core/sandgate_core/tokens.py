"""The data-plane tokens of sandboxes, derived and never stored.

A token is an HMAC of the sandbox id under the deployment's seed, so it is stable for the life of the id (S9), opens no
other sandbox (S11), and nothing secret lies in the database. The seed's fingerprint does, because a deployment that lost
its seed would hand out tokens that its running sandboxes' clients do not have.
"""

from __future__ import annotations

import hashlib
import hmac

__all__ = ["Tokens"]

# 160 bits: out of reach of guessing, and short enough for a header in a log excerpt or a URL signature.
_TOKEN_DIGITS = 40
_FINGERPRINT_DIGITS = 32


class Tokens:
    """Derives tokens under one seed."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed

    def token_of(self, sandbox_id: str, *, version: int) -> str:
        return self._mac(f"v{version}:{sandbox_id}")[:_TOKEN_DIGITS]

    def traffic_token_of(self, sandbox_id: str, *, version: int) -> str:
        """For the sandbox's ports (R10); not the one that opens its agent."""
        return self._mac(f"traffic:v{version}:{sandbox_id}")[:_TOKEN_DIGITS]

    def relay_token_of(self, sandbox_id: str) -> str:
        """Opens this sandbox's agent, at the relay of the core whose sandbox it is; for the gateways' own edges and cores."""
        return self._mac(f"relay:{sandbox_id}")

    @property
    def between_cores(self) -> str:
        """What a core proves with to another one of the same database."""
        return self._mac("between cores")

    @property
    def fingerprint(self) -> str:
        """Tells seeds apart without giving one away."""
        return self._mac("fingerprint")[:_FINGERPRINT_DIGITS]

    def _mac(self, text: str) -> str:
        return hmac.digest(self._seed, text.encode(), hashlib.sha256).hex()
