"""A backend held to its contract: what a plugin returns is looked at, and what it raises is told apart.

Between the core and every backend that was loaded as a plugin. A fault of the plugin, an exception outside the taxonomy or
a value that is not what :class:`~sandgate_plugin_api.Backend` promises, goes to the log with the names of backend and
distribution, and becomes an error that names both and nothing else. So the core's own code meets records of the right
types and errors of the taxonomy only, and no plugin ends the core by leaving the interpreter.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import structlog

from sandgate_errors import CapabilityMissing, Internal, SandgateError
from sandgate_plugin_api import (
    AgentAddress,
    AgentFeature,
    Backend,
    Capability,
    Egress,
    Placement,
    SandboxRequest,
    Survivor,
    Template,
    Usage,
)

__all__ = ["CheckedBackend", "described"]

T = TypeVar("T")

#: Bytes of a unix socket's address.
_SOCKET_PATH = 107
#: Bytes. It is a column of every record, and in memory for as long as the sandbox lives.
_LARGEST_HANDLE = 64 * 1024
_LARGEST_PORT = 65535
_log = structlog.get_logger(__name__)


class CheckedBackend(Backend):
    """Delegates every method. ``capabilities`` are those of the moment after :meth:`open`."""

    def __init__(self, inner: Backend, distribution: str) -> None:
        self.inner = inner
        self.name = inner.name
        self.host_bound = inner.host_bound
        self.capabilities = frozenset()
        self._distribution = distribution

    @property
    def described(self) -> str:
        """What an operator finds it by."""
        return f"backend '{self.name}' of '{self._distribution}'"

    async def open(self) -> None:
        await self.inner.open()
        self.host_bound = bool(self.inner.host_bound)
        claimed = self.inner.capabilities
        if not isinstance(claimed, frozenset | set) or not all(isinstance(each, Capability) for each in claimed):
            self._fault("capabilities", "is not a set of Capability")
        self.capabilities = frozenset(claimed)
        lacks = self.inner.lacks
        if not isinstance(lacks, frozenset | set) or not all(isinstance(each, AgentFeature) for each in lacks):
            self._fault("lacks", "is not a set of AgentFeature")
        self.lacks = frozenset(lacks)

    async def close(self) -> None:
        await self.inner.close()

    async def templates(self) -> Sequence[Template]:
        return self._all(Template, await self._call("templates", self.inner.templates()), "templates")

    async def find_template(self, name: str) -> Template | None:
        return self._maybe(Template, await self._call("find_template", self.inner.find_template(name)), "find_template")

    def reserve(self, request: SandboxRequest) -> Mapping[str, object]:
        with self._contained("reserve"):
            handle: object = self.inner.reserve(request)
        return self._handle(handle, "reserve")

    async def create(self, request: SandboxRequest, handle: Mapping[str, object]) -> Placement:
        return self._placement(await self._call("create", self.inner.create(request, handle)), "create")

    async def locate(self, handle: Mapping[str, object]) -> Placement | None:
        found: object = await self._call("locate", self.inner.locate(handle))
        return None if found is None else self._placement(found, "locate")

    async def survey(self) -> Sequence[Survivor]:
        survivors = self._all(Survivor, await self._call("survey", self.inner.survey()), "survey")
        for survivor in survivors:
            if not isinstance(survivor.sandbox_id, str):
                self._fault("survey", "found a sandbox whose id is no text")
            self._handle(survivor.handle, "survey")
        return survivors

    async def destroy(self, handle: Mapping[str, object]) -> None:
        await self._call("destroy", self.inner.destroy(handle))

    async def pause(self, handle: Mapping[str, object], *, memory: bool) -> Mapping[str, object]:
        claimed = Capability.PAUSE if memory else Capability.PAUSE_FILESYSTEM
        paused: object = await self._call("pause", self.inner.pause(handle, memory=memory), claimed)
        return self._handle(paused, "pause")

    async def resume(self, handle: Mapping[str, object]) -> Placement:
        resumed: object = await self._call(
            "resume", self.inner.resume(handle), Capability.PAUSE, Capability.PAUSE_FILESYSTEM
        )
        return self._placement(resumed, "resume")

    async def snapshot(self, handle: Mapping[str, object], *, snapshot_id: str) -> Mapping[str, object]:
        kept: object = await self._call(
            "snapshot", self.inner.snapshot(handle, snapshot_id=snapshot_id), Capability.SNAPSHOT
        )
        return self._handle(kept, "snapshot")

    async def delete_snapshot(self, snapshot: Mapping[str, object]) -> None:
        await self._call("delete_snapshot", self.inner.delete_snapshot(snapshot), Capability.SNAPSHOT)

    async def update_egress(self, handle: Mapping[str, object], egress: Egress) -> None:
        await self._call("update_egress", self.inner.update_egress(handle, egress), Capability.NETWORK_RULES)

    async def usage(self, handle: Mapping[str, object]) -> Usage | None:
        return self._maybe(Usage, await self._call("usage", self.inner.usage(handle)), "usage")

    async def address(self, handle: Mapping[str, object]) -> str | None:
        address = self._maybe(str, await self._call("address", self.inner.address(handle)), "address")
        if address is None:
            return None
        try:
            return str(ipaddress.ip_address(address))
        except ValueError as error:
            self._fault("address", f"returned {address[:100]!r}, which is no IP address", error)

    async def _call(self, method: str, work: Awaitable[T], *promised: Capability) -> T:
        with self._contained(method, *promised):
            return await work

    @contextmanager
    def _contained(self, method: str, *promised: Capability) -> Iterator[None]:
        try:
            yield
        except CapabilityMissing as error:
            if self.capabilities.intersection(promised):
                self._fault(method, f"refuses what the backend claims: {error.message}", error)
            raise
        except SandgateError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self._fault(method, f"raised {type(error).__name__}", error)

    def _placement(self, given: object, method: str) -> Placement:
        if not isinstance(given, Placement):
            self._fault(method, f"returned {type(given).__name__}, not Placement")
        self._handle(given.handle, method)
        if not isinstance(given.agent, AgentAddress):
            self._fault(method, f"returned an agent of {type(given.agent).__name__}, not AgentAddress")
        if (fault := _wrong_with(given.agent)) is not None:
            self._fault(method, fault)
        return given

    def _handle(self, given: object, method: str) -> Mapping[str, object]:
        if not isinstance(given, Mapping):
            self._fault(method, f"returned a handle of {type(given).__name__}, not a mapping")
        try:
            text = json.dumps(dict(given), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            self._fault(method, "returned a handle that JSON cannot carry", error)
        if len(text) > _LARGEST_HANDLE:
            self._fault(method, f"returned a handle of more than {_LARGEST_HANDLE} bytes")
        # As it will come back after a restart: keys are text by then, and tuples lists.
        carried: Mapping[str, object] = json.loads(text)
        return carried

    def _all(self, kind: type[T], given: object, method: str) -> Sequence[T]:
        if not isinstance(given, Sequence) or not all(isinstance(each, kind) for each in given):
            self._fault(method, f"did not return a sequence of {kind.__name__}")
        return given

    def _maybe(self, kind: type[T], given: object, method: str) -> T | None:
        if given is not None and not isinstance(given, kind):
            self._fault(method, f"returned {type(given).__name__}, not {kind.__name__} or None")
        return given

    def _fault(self, method: str, what: str, error: BaseException | None = None) -> NoReturn:
        _log.error(
            "a backend is faulty",
            backend=self.name,
            distribution=self._distribution,
            method=method,
            fault=what,
            exc_info=error,
        )
        raise Internal(f"{self.described} is faulty in {method}", should_retry=False) from error


def described(backend: Backend) -> str:
    """How to name one in an error."""
    return backend.described if isinstance(backend, CheckedBackend) else f"backend '{backend.name}'"


def _wrong_with(agent: AgentAddress) -> str | None:
    target, token = agent.target, agent.token
    # What call metadata can carry.
    if not isinstance(token, str) or not token or not (token.isascii() and token.isprintable()):
        return "returned an agent whose token is not printable ASCII text"
    if not isinstance(target, str):
        return "returned an agent whose target is no text"
    path = target.removeprefix("unix:")
    if path != target:
        usable = path.startswith("/") and len(path.encode(errors="surrogateescape")) <= _SOCKET_PATH
        return None if usable else f"returned an agent at a socket that nobody can dial: {path[:200]!r}"
    host, _, port = target.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) <= _LARGEST_PORT:
        return f"returned an agent at {target[:200]!r}, which is neither unix:/path nor host:port"
    return None
