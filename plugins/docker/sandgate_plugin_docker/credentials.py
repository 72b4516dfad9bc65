"""What the docker command on this machine knows of private registries: ``config.json``, and the helpers it names.

An engine keeps no credentials: whoever asks it to pull gives them along, as the docker command does.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["credentials_for", "registry_of"]

_log = logging.getLogger(__name__)

_HUB = "docker.io"
_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", "docker.io", "registry-1.docker.io")
_HELPER_LIMIT = 10.0
_HELPER_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def registry_of(reference: str) -> str:
    """The host in front of an image's name; without one it is Docker Hub's."""
    first, slash, _ = reference.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else _HUB


async def credentials_for(reference: str) -> Mapping[str, str] | None:
    """User name and password, or a token, for the registry of an image; None: it is asked without."""
    return await asyncio.to_thread(_credentials, registry_of(reference))


def _credentials(registry: str) -> Mapping[str, str] | None:
    folder = os.environ.get("DOCKER_CONFIG") or str(Path.home() / ".docker")
    try:
        config = json.loads(Path(folder, "config.json").read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("credentials of registries in %s/config.json cannot be read: %s", folder, error)
        return None
    if not isinstance(config, dict):
        return None
    keys = _HUB_KEYS if registry == _HUB else (registry, f"https://{registry}", f"https://{registry}/")
    for key in keys:
        helper = _table(config, "credHelpers").get(key) or config.get("credsStore")
        found = _of_helper(str(helper), key) if helper else _of_entry(_table(config, "auths").get(key))
        if found is not None:
            return {**found, "serveraddress": key}
    return None


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name)
    return table if isinstance(table, dict) else {}


def _of_entry(entry: object) -> Mapping[str, str] | None:
    if not isinstance(entry, dict):
        return None
    if token := entry.get("identitytoken"):
        return {"identitytoken": str(token)}
    try:
        user, _, password = base64.b64decode(str(entry.get("auth") or ""), validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return {"username": user, "password": password.rstrip("\0")} if user else None


def _of_helper(helper: str, key: str) -> Mapping[str, str] | None:
    if not _HELPER_NAME.fullmatch(helper):
        return None
    try:
        done = subprocess.run(
            [f"docker-credential-{helper}", "get"],
            input=key.encode(),
            capture_output=True,
            timeout=_HELPER_LIMIT,
            check=True,
        )
        found = json.loads(done.stdout)
        user, secret = str(found["Username"]), str(found["Secret"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        # A helper also fails for a registry of which it knows nothing.
        _log.debug("docker-credential-%s has nothing for %s: %s", helper, key, error)
        return None
    # The agreed sign for a token in place of a password.
    return {"identitytoken": secret} if user == "<token>" else {"username": user, "password": secret}
