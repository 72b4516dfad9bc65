"""The one place that makes an absolute path of what a caller wrote (F2-F5, P22-P24)."""

from __future__ import annotations

import posixpath

from sandgate_agent.accounts import Account
from sandgate_errors import InvalidArgument

__all__ = ["resolve"]

#: Limits of Linux: a path with its closing NUL, and one name.
_LONGEST_PATH = 4095
_LONGEST_NAME = 255


def resolve(path: str, account: Account, *, default: str = "", what: str = "path") -> str:
    """The absolute, cleaned path that ``path`` means for the acting account.

    Empty means ``default``, itself relative to the home, or the home. ``..`` is cleaned by text, before links are
    looked at. Raises InvalidArgument, with ``what`` as the name of the field.
    """
    full = _clean(_expand(path or default, account, what))
    _check(full, what)
    return full


def _expand(path: str, account: Account, what: str) -> str:
    if path == "~" or path.startswith("~/"):
        path = path[1:].lstrip("/")
    elif path.startswith("~"):
        raise InvalidArgument(f"{what} '{_brief(path)}' names another user's home, which is not supported")
    return posixpath.join(account.home, path)


def _clean(path: str) -> str:
    # Two leading slashes are kept by normpath, as POSIX allows; Linux gives them no meaning.
    return "/" + posixpath.normpath("/" + path).lstrip("/")


def _check(path: str, what: str) -> None:
    if "\0" in path:
        raise InvalidArgument(f"{what} contains a NUL byte")
    encoded = path.encode(errors="surrogateescape")
    if len(encoded) > _LONGEST_PATH or any(len(name) > _LONGEST_NAME for name in encoded.split(b"/")):
        raise InvalidArgument(f"{what} '{_brief(path)}' is too long")


def _brief(path: str) -> str:
    return path if len(path) <= 100 else path[:100] + "…"
