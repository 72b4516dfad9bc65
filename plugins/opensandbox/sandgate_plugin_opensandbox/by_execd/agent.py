"""An agent outside its sandbox: the agent's gRPC services in this process, with execd where the system would be.

Core and edges find it at a unix socket, as they do every agent, and speak to it as to every other. One for each sandbox, so
that nothing of one can be reached with the token of another.

After a start of the gateway an agent is there at once, and takes up what an earlier one left when it is first called: its
sandbox may stand still, and then answers nobody.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import aiohttp
import grpc
import grpc.aio

from sandgate_agent.accounts import Account
from sandgate_agent.calls import Call, generic_handler
from sandgate_agent.health import Health
from sandgate_agent.journal import Journal
from sandgate_agent.processes import Processes
from sandgate_agent.sandbox import Sandbox
from sandgate_agent.services.process import ProcessService
from sandgate_errors import Internal, Unavailable
from sandgate_plugin_api import AgentAddress, to_its_end
from sandgate_plugin_opensandbox.by_execd.client import Client
from sandgate_plugin_opensandbox.by_execd.ports import FarPorts
from sandgate_plugin_opensandbox.by_execd.records import Records
from sandgate_plugin_opensandbox.by_execd.services import FarAgentService, FarFilesystemService, OneAccount, measure
from sandgate_plugin_opensandbox.by_execd.sessions import Sessions
from sandgate_plugin_opensandbox.by_execd.tree import Tree
from sandgate_plugin_opensandbox.execd import EGRESS_PORT, EXECD_PORT
from sandgate_plugin_opensandbox.server import Endpoint

__all__ = ["FarAgent", "FarAgents", "Surroundings"]

_log = logging.getLogger(__name__)

_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.max_frame_size", 1024 * 1024),
)
_GRACE_SECONDS = 0.3
_HEALTH = "/grpc.health."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What execd's commands find around them, as it was asked before the first of ours."""

    account: Account
    group: str
    path: str

    @classmethod
    def recorded(cls, about: Mapping[str, Any]) -> Surroundings:
        """Raises Internal for what :attr:`record` has not made."""
        try:
            name, home, path, group = (str(about[key]) for key in ("name", "home", "path", "group"))
            uid, gid = int(about["uid"]), int(about["gid"])
        except (LookupError, TypeError, ValueError, OverflowError):
            raise Internal("the sandbox's records are damaged") from None
        if not home.startswith("/") or "\0" in home + path + name:
            raise Internal("the sandbox's records are damaged")
        account = Account(name=name, uid=uid, gid=gid, groups=(gid,), home=home)
        return cls(account=account, group=group, path=path)

    @property
    def record(self) -> Mapping[str, object]:
        account = self.account
        return {
            "name": account.name,
            "uid": account.uid,
            "gid": account.gid,
            "home": account.home,
            "group": self.group,
            "path": self.path,
        }


class FarAgent:
    """The agent of one sandbox."""

    def __init__(self, client: Client, *, path: Path, token: str, tls: Callable[[], ssl.SSLContext]) -> None:
        self._client = client
        self._path = path
        self._token = token
        self._tls = tls
        self._records = Records(client)
        self._services: _Services | None = None
        #: Services are being made, for all who wait for them, or ended.
        self._settling: asyncio.Task[_Services] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._closed = False
        self._server = grpc.aio.server(options=_OPTIONS, interceptors=(_Door(self._settled),))
        self._health = Health(frozenset({ProcessService.name, FarFilesystemService.name, FarAgentService.name}))

    @property
    def address(self) -> AgentAddress:
        return AgentAddress(target=f"unix:{self._path}", token=self._token)

    async def open(self, surroundings: Surroundings | None = None) -> None:
        """Accept calls. Without ``surroundings`` they are in the sandbox's records, with what ran there."""
        if surroundings is not None:
            await self._records.clear()
            await self._records.keep_surroundings(surroundings.record)
            self._services = self._made(surroundings)
        # Of an earlier start: nobody else makes anything here.
        self._path.unlink(missing_ok=True)
        self._server.add_generic_rpc_handlers((self._health.handler(),))
        self._server.add_insecure_port(f"unix:{self._path}")
        # The library takes a start that is broken off for a fault of its own.
        await to_its_end(self._server.start())
        self._path.chmod(0o600)

    async def close(self) -> None:
        """End every stream. Commands go on in the sandbox, if that does."""
        self._closed = True
        self._health.stop()
        under_way = [task for task in (self._settling, self._ending) if task is not None]
        if self._settling is not None:
            self._settling.cancel()
        if under_way:
            await asyncio.wait(under_way)
        if self._services is not None:
            await self._services.close()
        await self._server.stop(_GRACE_SECONDS)
        self._path.unlink(missing_ok=True)

    def moved(self) -> None:
        """Its execd may be somewhere else now."""
        self._client.moved()

    async def _settled(self) -> _Services:
        """The services, for which what another gateway left is taken up. Raises SandboxUnreachable; the next call tries again."""
        if self._services is not None:
            return self._services
        if self._closed:
            raise Unavailable("the gateway lets go of the sandbox", retry_after=1)
        if self._settling is None:
            self._settling = asyncio.create_task(self._settle())
            self._settling.add_done_callback(self._settling_over)
        settling = self._settling
        # One try for all: many who had to wait for one another in front of a silent execd would wait for ever.
        try:
            return await asyncio.shield(settling)
        except asyncio.CancelledError:
            if settling.cancelled():
                raise Unavailable("the gateway lets go of the sandbox", retry_after=1) from None
            raise

    async def _settle(self) -> _Services:
        if self._ending is not None:
            await asyncio.wait({self._ending})
        known = await self._records.surroundings()
        if known is None:
            raise Internal("the sandbox was not started by this kind of backend")
        services = self._made(Surroundings.recorded(known))
        try:
            await services.take_up()
        except BaseException:
            await services.close()
            raise
        self._services = services
        return services

    def _settling_over(self, settling: asyncio.Task[_Services]) -> None:
        self._settling = None
        if not settling.cancelled():
            # Whoever waited has it; all may have left.
            settling.exception()

    def _let_go(self, services: _Services) -> None:
        """Another gateway has taken the sandbox up. Should it be ours again, the next call takes it back."""
        if self._services is services and not self._closed:
            self._services = None
            self._ending = asyncio.create_task(services.close())

    def _made(self, surroundings: Surroundings) -> _Services:
        token = self._token.encode()
        services = _Services(self._client, self._records, surroundings, token=token, tls=self._tls)
        services.on_taken = lambda: self._let_go(services)
        return services


class _Door(grpc.aio.ServerInterceptor):
    """Finds the handler of a call, for which the services may have to be made first."""

    def __init__(self, settled: Callable[[], Awaitable[_Services]]) -> None:
        self._settled = settled

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method.startswith(_HEALTH):
            return await continuation(handler_call_details)
        try:
            services = await self._settled()
        except Exception as error:
            return _refusing(error)
        return services.handler(handler_call_details) or await continuation(handler_call_details)


def _refusing(error: Exception) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await Call(context).refuse(error)

    return grpc.stream_stream_rpc_method_handler(refuse)


class _Services:
    """The services of one sandbox, and what they share."""

    def __init__(
        self,
        client: Client,
        records: Records,
        surroundings: Surroundings,
        *,
        token: bytes,
        tls: Callable[[], ssl.SSLContext],
    ) -> None:
        account = surroundings.account
        self._records = records
        self.on_taken: Callable[[], None] = lambda: None
        self._sessions = Sessions(client, records, on_taken=self._taken)
        journal = Journal()
        self._processes = Processes(self._sessions, journal)
        sandbox = Sandbox(OneAccount(account), system_files=False, path=surroundings.path)
        tree = Tree(client, owner=account.name, group=surroundings.group)
        self._agent = FarAgentService(
            sandbox,
            account,
            tree=tree,
            records=records,
            ports=FarPorts(client, closed=frozenset({EXECD_PORT, EGRESS_PORT}), tls=tls),
            journal=journal,
            measure=functools.partial(measure, client),
        )
        services = (ProcessService(self._processes, sandbox), FarFilesystemService(sandbox, tree), self._agent)
        self._handlers = [generic_handler(service.name, service.methods(), token) for service in services]

    def handler(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return next((found for handler in self._handlers if (found := handler.service(details)) is not None), None)

    def _taken(self) -> None:
        self.on_taken()

    async def take_up(self) -> None:
        if (identity := await self._records.identity()) is not None:
            self._agent.restore(identity)
        await self._sessions.adopt(
            lambda command, session: self._processes.adopt(command, session.child, session.descriptors)
        )

    async def close(self) -> None:
        await self._processes.close(Unavailable("the gateway is ending"))
        await self._sessions.close()


class FarAgents:
    """All agents of one gateway, by sandbox."""

    def __init__(self, session: aiohttp.ClientSession, folder: Path, *, tls: Callable[[], ssl.SSLContext]) -> None:
        self._session = session
        self._folder = folder
        self._tls = tls
        self._agents: dict[str, tuple[str, FarAgent]] = {}
        #: One opens or forgets the agent of a sandbox at a time.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._closed = False
        for left in folder.glob("*.sock"):
            # Of a gateway that was killed; what goes on gets another.
            left.unlink()

    async def open(
        self,
        sandbox: str,
        server_id: str,
        where: Callable[[int], Awaitable[Endpoint]],
        *,
        token: str,
        execd_token: str,
        surroundings: Surroundings | None = None,
    ) -> FarAgent:
        """The sandbox's agent; the one that there is, if it works in what has this id on the server and is not new."""
        async with self._alone(sandbox):
            known = self._agents.get(sandbox)
            if known is not None and known[0] == server_id and surroundings is None:
                return known[1]
            await self._forget(sandbox)
            if self._closed:
                raise Unavailable("the gateway is ending")
            client = Client(self._session, where, port=EXECD_PORT, token=execd_token)
            agent = FarAgent(client, path=self._folder / f"{sandbox}.sock", token=token, tls=self._tls)
            self._agents[sandbox] = server_id, agent
            try:
                await agent.open(surroundings)
            except BaseException:
                await self._forget(sandbox)
                raise
            return agent

    async def forget(self, sandbox: str) -> None:
        async with self._alone(sandbox):
            await self._forget(sandbox)

    def _alone(self, sandbox: str) -> asyncio.Lock:
        return self._locks.setdefault(sandbox, asyncio.Lock())

    async def _forget(self, sandbox: str) -> None:
        if (known := self._agents.pop(sandbox, None)) is not None:
            await known[1].close()

    async def close(self) -> None:
        self._closed = True
        agents = [agent for _, agent in self._agents.values()]
        self._agents.clear()
        for failed in await asyncio.gather(*(agent.close() for agent in agents), return_exceptions=True):
            if failed is not None:
                _log.error("an agent could not be closed", exc_info=failed)
