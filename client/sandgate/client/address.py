"""Where the core is, and what proves the caller: from arguments, then the environment, then the state directory.

A core that is named is asked with an API key and nothing else: the internal token manages the whole gateway, so it goes
to the socket of its own state directory only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from sandgate import runtime, state
from sandgate_errors import InvalidArgument

__all__ = ["Address", "of_gateway", "resolve"]

#: The environment's names for what the arguments ``core``, ``api_key`` and ``state_dir`` are.
CORE = "SANDGATE_CORE"
API_KEY = "SANDGATE_API_KEY"
STATE_DIR = "SANDGATE_STATE_DIR"


@dataclass(frozen=True, kw_only=True)
class Address:
    """One core, and the metadata that opens it."""

    #: A gRPC target: ``host:port`` or ``unix:/path``.
    target: str
    credentials: tuple[tuple[str, str], ...] = field(repr=False)


def resolve(*, core: str | None = None, api_key: str | None = None, state_dir: str | Path | None = None) -> Address:
    """The core that the arguments and the environment name. Raises InvalidArgument, or FailedPrecondition for a folder.

    ``core`` is a gRPC target. Without it the core of the gateway on this machine is taken that runs on ``state_dir``.
    """
    if core is not None and state_dir is not None:
        raise InvalidArgument("give either core or state_dir, not both")
    key = _checked_key(api_key if api_key is not None else os.environ.get(API_KEY) or None)
    target = core if core is not None else os.environ.get(CORE) or None
    if target is None or state_dir is not None:
        return _on_this_machine(_folder(state_dir), key)
    if key is None:
        raise InvalidArgument(f"an API key is needed for the core at {target}: give api_key, or set {API_KEY}")
    return Address(target=target, credentials=(("api-key", key),))


def of_gateway(folder: Path) -> Address:
    """The core of this machine's gateway, for who manages it: sees everybody's sandboxes. Raises FailedPrecondition."""
    token = state.read_private(folder / state.TOKEN)
    return Address(target=_socket(folder), credentials=(("internal-token", token),))


def _on_this_machine(folder: Path, key: str | None) -> Address:
    return of_gateway(folder) if key is None else Address(target=_socket(folder), credentials=(("api-key", key),))


def _socket(folder: Path) -> str:
    return f"unix:{runtime.core_socket(folder)}"


def _folder(given: str | Path | None) -> Path:
    chosen = given if given is not None else os.environ.get(STATE_DIR) or None
    if chosen is not None:
        return Path(chosen).expanduser().absolute()
    # Loads the settings' models, which nobody needs who names a core.
    from sandgate.config import default_state_dir

    return default_state_dir()


def _checked_key(key: str | None) -> str | None:
    # It travels as a header; the text is left out, since it may be a real key with a slip in it.
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key and key):
        raise InvalidArgument("the API key contains characters that no key has")
    return key
