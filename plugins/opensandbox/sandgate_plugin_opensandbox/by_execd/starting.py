"""Agents outside their sandboxes: the place that :class:`sandgate_plugin_opensandbox.starting.Starter` has for those inside."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sandgate_agent.accounts import Account
from sandgate_errors import Internal, SandboxUnreachable
from sandgate_plugin_api import AgentAddress
from sandgate_plugin_opensandbox.by_execd.agent import FarAgents, Surroundings
from sandgate_plugin_opensandbox.execd import EXECD_PORT, Execd
from sandgate_plugin_opensandbox.execds import Execds
from sandgate_plugin_opensandbox.identity import Identity, Name
from sandgate_plugin_opensandbox.server import Endpoint, Server
from sandgate_plugin_opensandbox.settings import TemplateSettings

__all__ = ["ExecdStarter"]

_log = logging.getLogger(__name__)

#: Seconds.
_ANSWER_LIMIT = 20.0
_MARK = "sandgate:"
#: One line for each, as execd tells output by lines.
_QUESTION = " && ".join(
    f'echo "{_MARK}{word}"' for word in ("$(id -u)", "$(id -g)", "$(id -un)", "$(id -gn)", "$(cd && pwd)", "$PATH")
)


class ExecdStarter:
    """Makes them, and holds them (:class:`sandgate_plugin_opensandbox.starting.Agents`)."""

    def __init__(self, server: Server, identity: Identity, agents: FarAgents) -> None:
        self._server = server
        self._identity = identity
        self._agents = agents
        self._execds = Execds(server, identity)

    def environment(self, name: Name) -> Mapping[str, str]:
        return self._execds.environment(name)

    async def start(self, name: Name, sandbox: str, template: TemplateSettings) -> AgentAddress:
        execd = await self._execds.up(name, sandbox)
        surroundings = await _surroundings(execd)
        if template.user != surroundings.account.name:
            _log.error("the template's user is '%s', and execd works as '%s'", template.user, surroundings.account.name)
            raise Internal("the sandbox could not be started: its template's user is not the one that execd works as")
        return await self._opened(name, sandbox, surroundings)

    async def start_if_needed(self, name: Name, sandbox: str, template: TemplateSettings) -> AgentAddress:
        # Cheap, and what an earlier one did is nobody's.
        return await self.start(name, sandbox, template)

    async def reach(self, name: Name, sandbox: str) -> AgentAddress:
        return await self._opened(name, sandbox, None)

    async def reached(self, name: Name, sandbox: str) -> AgentAddress:
        address = await self._opened(name, sandbox, None, moved=True)
        execd = Execd(self._server.session, await self._server.endpoint(sandbox, EXECD_PORT), self._execds.token(name))
        if not await execd.answers(seconds=_ANSWER_LIMIT):
            raise SandboxUnreachable("the sandbox's execd does not answer", retry_after=1)
        return address

    async def forget(self, name: Name) -> None:
        await self._agents.forget(name.sandbox)

    async def _opened(
        self, name: Name, sandbox: str, surroundings: Surroundings | None, *, moved: bool = False
    ) -> AgentAddress:
        async def where(port: int) -> Endpoint:
            return await self._server.endpoint(sandbox, port)

        agent = await self._agents.open(
            name.sandbox,
            sandbox,
            where,
            token=self._identity.token(name, "agent"),
            execd_token=self._execds.token(name),
            surroundings=surroundings,
        )
        if moved:
            agent.moved()
        return agent.address


async def _surroundings(execd: Execd) -> Surroundings:
    """Raises Internal for a sandbox whose shell does not say."""
    told = await execd.run(_QUESTION, uid=None)
    words = [line.strip().removeprefix(_MARK) for line in told.output if line.startswith(_MARK)]
    try:
        uid, gid, user, group, home, path = words
        account = Account(name=user, uid=int(uid), gid=int(gid), groups=(int(gid),), home=home)
    except ValueError:
        _log.error("a sandbox does not say who execd is in it: %s", told.words)
        raise Internal("the sandbox could not be started: its image may lack 'id'") from None
    return Surroundings(account=account, group=group, path=path)
