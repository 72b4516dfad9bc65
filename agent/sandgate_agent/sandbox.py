"""What the agent was told about its sandbox: variables, default user, default working directory (behaviour.md 2, 3.2)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from sandgate_agent.accounts import Account, Accounts
from sandgate_errors import Unauthenticated

__all__ = ["Identity", "Sandbox"]

log = logging.getLogger(__name__)

_FALLBACK_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VARIABLES_FOLDER = "/run/e2b"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The content of one Init call."""

    sandbox_id: str
    template_id: str
    envs: Mapping[str, str] = field(default_factory=dict)
    default_user: str = "user"
    default_workdir: str = ""

    @property
    def own_variables(self) -> dict[str, str]:
        return {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": self.sandbox_id, "E2B_TEMPLATE_ID": self.template_id}


class Sandbox:
    """Answers who acts, where and with which variables. The last Init call holds."""

    def __init__(
        self, accounts: Accounts, *, system_files: bool, programs: str | None = None, path: str | None = None
    ) -> None:
        """``programs`` is a folder that comes first on the PATH of commands; ``path`` is the rest, in place of our own."""
        self.accounts = accounts
        self._system_files = system_files
        self._identity: Identity | None = None
        path = path or os.environ.get("PATH") or _FALLBACK_PATH
        self._path = f"{programs}:{path}" if programs else path

    @property
    def default_workdir(self) -> str:
        return self._identity.default_workdir if self._identity else ""

    def init(self, identity: Identity) -> None:
        self._identity = identity
        if self._system_files:
            _write_variables(identity.own_variables)

    def acting(self, name: str | None) -> Account:
        """The account that a call acts as. Before any Init the default is root (U2)."""
        name = name or (self._identity.default_user if self._identity else "root")
        if not name:
            raise Unauthenticated("no user is named and the sandbox has no default user")
        return self.accounts.find(name)

    def check_named(self, name: str | None) -> None:
        """For a call that acts as nobody: a name that it carries must be an account's all the same (U3)."""
        if name is not None:
            self.accounts.find(name)

    @property
    def variables(self) -> dict[str, str]:
        """Those of every command, whoever it acts as (H4); the sandbox's own win."""
        known = self._identity
        return {**known.envs, **known.own_variables} if known else {}

    def environment(self, account: Account, request: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of a command, built from nothing: later entries win (P12-P16)."""
        return {
            "PATH": self._path,
            "HOME": account.home,
            "USER": account.name,
            "LOGNAME": account.name,
            **self.variables,
            **request,
        }


def _write_variables(variables: Mapping[str, str]) -> None:
    """The same values as files, for programs that do not inherit the environment (P19)."""
    try:
        os.makedirs(_VARIABLES_FOLDER, mode=0o755, exist_ok=True)
        for name, value in variables.items():
            _replace(os.path.join(_VARIABLES_FOLDER, f".{name}"), value)
    except OSError as error:
        log.warning("the files below %s could not be written: %s", _VARIABLES_FOLDER, error)


def _replace(path: str, value: str) -> None:
    # Written anew and not in place: what stands there may be a link that the sandbox's code made.
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(value)
