"""What of a sandbox is on the gateway's machine: its folders, and how its secrets come about.

::

    <state>/gateway.json          who this gateway is towards the engine, and the root of all tokens; 0600
    <state>/boxes/<box>/          what cannot be found in the container: its egress rules, its certificate; 0700
    <runtime>/<box>/m/            mounted read-only into the container: there its first program meets the backend
    <runtime>/<box>/s/agent       the agent's socket; the container has no path to this folder

A box is named after its sandbox, or after nobody when it was made ahead: a mount cannot be renamed as a container can.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandgate_errors import Conflict, FailedPrecondition, Internal

__all__ = ["Box", "Identity", "Shelf"]

# A name goes into paths: handles come back from the store, and a store can be edited.
_NAME = re.compile(r"[a-z0-9]{1,40}")


@dataclass(frozen=True)
class Identity:
    """Which gateway's the containers are."""

    #: In the names and labels of all that it makes.
    gateway: str
    _secret: bytes

    @classmethod
    def of(cls, state: Path) -> Identity:
        """The one kept in ``state``, made at the first start. Raises FailedPrecondition when it is damaged."""
        path = state / "gateway.json"
        try:
            known = json.loads(path.read_bytes())
            return cls(str(known["id"]), bytes.fromhex(known["secret"]))
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            # A new one would lose sight of every sandbox.
            raise FailedPrecondition(f"{path} is damaged: restore it, or remove it and all containers of it") from None
        known = {"id": secrets.token_hex(4), "secret": secrets.token_hex(32)}
        write_private(path, json.dumps(known).encode())
        return cls(known["id"], bytes.fromhex(known["secret"]))

    def token(self, box: str) -> str:
        """What the agent of a box asks of its callers. Nothing of it is stored."""
        digest = hmac.digest(self._secret, f"agent of {box}".encode(), hashlib.sha256)
        return base64.urlsafe_b64encode(digest[:24]).decode()


@dataclass(frozen=True)
class Box:
    """The places of one box; none of them need exist."""

    name: str
    runtime: Path
    state: Path

    @property
    def meeting(self) -> Path:
        return self.runtime / "m"

    @property
    def sockets(self) -> Path:
        return self.runtime / "s"

    @property
    def socket(self) -> Path:
        return self.sockets / "agent"

    def make(self, *, anew: bool) -> None:
        """The folders, empty. ``anew`` in place of those that were there: nothing of the box may run.

        Raises Conflict when they are there and ought not to be.
        """
        if anew:
            shutil.rmtree(self.runtime, ignore_errors=True)
        try:
            # Closed, so that the two inside can be open: root of a container may be nobody out here.
            self.runtime.mkdir(mode=0o700)
        except FileExistsError:
            raise Conflict("this sandbox is being made already") from None
        for folder, mode in ((self.meeting, 0o755), (self.sockets, 0o777)):
            folder.mkdir()
            folder.chmod(mode)

    def write(self, name: str, data: bytes) -> None:
        """Keep something of it over restarts of the machine."""
        self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self.state / name, data)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.state / name).read_bytes()
        except FileNotFoundError:
            return None

    def remove(self) -> None:
        shutil.rmtree(self.runtime, ignore_errors=True)
        shutil.rmtree(self.state, ignore_errors=True)


class Shelf:
    """All boxes of one gateway."""

    def __init__(self, *, state: Path, runtime: Path) -> None:
        self._state = state / "boxes"
        self._runtime = runtime

    def box(self, name: object) -> Box:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise Internal("the handle of the sandbox is damaged")
        return Box(name, self._runtime / name, self._state / name)

    def all(self) -> Iterator[Box]:
        """Every box of which anything is left."""
        folders = [folder for folder in (self._state, self._runtime) if folder.is_dir()]
        names = {entry.name for folder in folders for entry in folder.iterdir() if entry.is_dir()}
        return (self.box(name) for name in sorted(names) if _NAME.fullmatch(name))


def write_private(path: Path, data: bytes) -> None:
    """Replace a file as a whole; only the gateway's user may read it."""
    draft = path.with_name(f"{path.name}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    draft.rename(path)
