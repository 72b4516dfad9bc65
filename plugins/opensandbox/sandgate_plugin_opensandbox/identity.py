"""Who this gateway is towards the server, and how the secrets of its sandboxes come about.

Nothing of a secret is stored with a sandbox: each is derived from the gateway's and the sandbox's names, so that every core
that shares the settings comes to the same, and a copy of the database opens nothing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from sandgate_errors import FailedPrecondition, Internal
from sandgate_plugin_opensandbox.settings import OpenSandboxSettings

__all__ = ["Identity", "Name"]

_SANDBOX = re.compile(r"[a-z0-9]{1,40}")
_GATEWAY = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True)
class Name:
    """A sandbox's name on the server: its gateway's and its own, as labels."""

    gateway: str
    sandbox: str

    @classmethod
    def of(cls, gateway: object, sandbox: object) -> Name:
        """Raises Internal for what no handle of ours holds: a store can be edited."""
        if not isinstance(gateway, str) or not isinstance(sandbox, str):
            raise Internal("the handle of the sandbox is damaged")
        if not _GATEWAY.fullmatch(gateway) or not _SANDBOX.fullmatch(sandbox):
            raise Internal("the handle of the sandbox is damaged")
        return cls(gateway, sandbox)


@dataclass(frozen=True)
class Identity:
    """The gateway's name and the root of all tokens."""

    gateway: str
    _secret: bytes = field(repr=False)

    @classmethod
    def of(cls, settings: OpenSandboxSettings, state: Path) -> Identity:
        """From the settings, and for what they leave open from ``state``. Raises FailedPrecondition when that is damaged."""
        own_name, own_secret = _kept(state)
        shared = settings.secret.get_secret_value() if settings.secret is not None else settings.key
        root = own_secret if shared is None else shared.encode()
        return cls(settings.gateway or own_name, root)

    def token(self, name: Name, purpose: str) -> str:
        """What opens one thing of one sandbox."""
        text = f"sandgate {purpose} of {name.gateway}/{name.sandbox}"
        digest = hmac.digest(self._secret, text.encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest[:24]).decode()


def _kept(state: Path) -> tuple[str, bytes]:
    path = state / "gateway.json"
    try:
        known = json.loads(path.read_bytes())
        return str(known["id"]), bytes.fromhex(known["secret"])
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError):
        # A new one would lose sight of every sandbox.
        raise FailedPrecondition(f"{path} is damaged: restore it, or remove it and all sandboxes of it") from None
    known = {"id": f"g{secrets.token_hex(6)}", "secret": secrets.token_hex(32)}
    draft = path.with_name(f"{path.name}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(json.dumps(known).encode())
    draft.rename(path)
    return str(known["id"]), bytes.fromhex(known["secret"])
