"""``Sandbox``: one sandbox, for callers that may block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from sandgate.client import sandbox_calls
from sandgate.client.address import Address, resolve
from sandgate.client.blocking import Core
from sandgate.client.commands import Commands, Pty
from sandgate.client.exceptions import exception_of
from sandgate.client.files import Filesystem
from sandgate.client.records import SandboxInfo
from sandgate.client.sandbox_calls import DEFAULT_TIMEOUT, Wanted
from sandgate_errors import SandgateError

__all__ = ["Sandbox"]


class Sandbox:
    """One sandbox of a gateway, reached at the gateway's core by gRPC.

    Where the core is: ``core`` (``host:port`` or ``unix:/path``; else ``SANDGATE_CORE``) with an API key in ``api_key``
    (else ``SANDGATE_API_KEY``); without either, the gateway of this machine that runs on ``state_dir`` (else
    ``SANDGATE_STATE_DIR``, else the usual place), which needs no key from who may read that directory.

    ``Sandbox(sandbox_id)`` asks nothing yet; ``connection`` lets it use one that is open. As a context manager it ends the sandbox: ``with Sandbox.create() as
    sandbox``. ``request_timeout`` is the time for one answer, in seconds (None: 60, and 120 for a create; 0: no limit).
    Every method raises SandboxException or one of its kinds: NotFoundException when the sandbox is gone.
    """

    def __init__(
        self,
        sandbox_id: str,
        *,
        core: str | None = None,
        api_key: str | None = None,
        state_dir: str | Path | None = None,
        connection: Core | None = None,
    ) -> None:
        self.sandbox_id = sandbox_id
        self._core = connection or Core(_address(core, api_key, state_dir))
        self.commands = Commands(self._core, sandbox_id)
        self.pty = Pty(self._core, sandbox_id)
        self.files = Filesystem(self._core, sandbox_id)

    @classmethod
    def create(
        cls,
        template: str = "base",
        *,
        timeout: float = DEFAULT_TIMEOUT,
        metadata: Mapping[str, str] | None = None,
        envs: Mapping[str, str] | None = None,
        allow_internet_access: bool = True,
        core: str | None = None,
        api_key: str | None = None,
        state_dir: str | Path | None = None,
        request_timeout: float | None = None,
    ) -> Self:
        """Make a sandbox that lives for ``timeout`` seconds, and return once it takes commands.

        Raises NotFoundException for an unknown template.
        """
        wanted = Wanted(
            template=template,
            timeout=timeout,
            metadata=metadata or {},
            envs=envs or {},
            allow_internet_access=allow_internet_access,
        )
        connection = Core(_address(core, api_key, state_dir))
        try:
            sandbox_id = connection.run(sandbox_calls.create(wanted, request_timeout))
        except BaseException:
            connection.close()
            raise
        return cls(sandbox_id, connection=connection)

    @classmethod
    def connect(
        cls,
        sandbox_id: str,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        core: str | None = None,
        api_key: str | None = None,
        state_dir: str | Path | None = None,
        request_timeout: float | None = None,
    ) -> Self:
        """A sandbox that exists; woken if it is paused, and living for at least ``timeout`` seconds from now."""
        connection = Core(_address(core, api_key, state_dir))
        try:
            connection.run(sandbox_calls.connect(sandbox_id, timeout, request_timeout))
        except BaseException:
            connection.close()
            raise
        return cls(sandbox_id, connection=connection)

    @staticmethod
    def list(
        *,
        metadata: Mapping[str, str] | None = None,
        core: str | None = None,
        api_key: str | None = None,
        state_dir: str | Path | None = None,
        request_timeout: float | None = None,
    ) -> list[SandboxInfo]:
        """The caller's sandboxes whose metadata hold all these pairs, newest first."""
        connection = Core(_address(core, api_key, state_dir))
        try:
            return connection.run(sandbox_calls.listed(metadata or {}, request_timeout))
        finally:
            connection.close()

    def get_info(self, request_timeout: float | None = None) -> SandboxInfo:
        """What the gateway knows of it."""
        return self._core.run(sandbox_calls.get_info(self.sandbox_id, request_timeout))

    def set_timeout(self, timeout: float, request_timeout: float | None = None) -> None:
        """Let it end ``timeout`` seconds from now; 0: at once."""
        self._core.run(sandbox_calls.set_timeout(self.sandbox_id, timeout, request_timeout))

    def pause(self, *, memory: bool = True, request_timeout: float | None = None) -> bool:
        """Stop it and keep its files and, with ``memory``, its processes; False when it was paused already.

        A paused sandbox does not end by its lifetime. Handles of its commands wait for its :meth:`resume`; without
        ``memory`` they fail, as the processes are given up. Waits for 120 s unless told otherwise.

        Raises SandboxException when the backend cannot do it.
        """
        return self._core.run(sandbox_calls.pause(self.sandbox_id, memory=memory, timeout=request_timeout))

    def resume(
        self, timeout: float = DEFAULT_TIMEOUT, *, memory: bool = True, request_timeout: float | None = None
    ) -> bool:
        """Wake it and let it live for at least ``timeout`` seconds from now; False when it was not paused.

        Without ``memory`` it is started anew from its files. Waits for 120 s unless told otherwise.

        Raises SandboxException when its memory cannot be brought back.
        """
        return self._core.run(sandbox_calls.resume(self.sandbox_id, timeout, memory=memory, timeout=request_timeout))

    def kill(self, request_timeout: float | None = None) -> bool:
        """End it and everything in it; False when it is gone already."""
        return self._core.run(sandbox_calls.kill(self.sandbox_id, request_timeout))

    def close(self) -> None:
        """Let go of the connection; the sandbox lives on. Handles of its commands end."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.kill()
        finally:
            self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sandbox_id!r})"


def _address(core: str | None, api_key: str | None, state_dir: str | Path | None) -> Address:
    try:
        return resolve(core=core, api_key=api_key, state_dir=state_dir)
    except SandgateError as error:
        raise exception_of(error) from error
