"""The sandboxes of one gateway on the server: making one with all that belongs to it, and leaving nothing of it.

Below the backend, which decides what is made and when; above the server, which keeps on with what nobody waits for any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from sandgate_errors import Internal, NotFound, SandgateError, Unavailable
from sandgate_plugin_api import AgentAddress, Egress, Resources, to_its_end
from sandgate_plugin_opensandbox.identity import Name
from sandgate_plugin_opensandbox.keeping import Keeper, labels
from sandgate_plugin_opensandbox.rules import policy
from sandgate_plugin_opensandbox.server import Details, Lost, Refused, Server, has_ended, state_of, told
from sandgate_plugin_opensandbox.starting import Agents
from sandgate_plugin_opensandbox.templates import Model

__all__ = ["Fleet"]

_log = logging.getLogger(__name__)

#: Does nothing for as long as there is: what runs is started by our agent.
_FIRST_PROGRAM = ["tail", "-f", "/dev/null"]
#: Seconds. A pod that waits for its image; one of which only a list knows may never run.
_RUNNING_LIMIT = 300.0
_FOUND_RUNNING_LIMIT = 10.0
#: How long a create whose answer was lost is looked for, and one whose caller has gone is waited for.
_RECONCILE_SECONDS = 10.0
_POST_PATIENCE = 30.0
#: After a start, creates of an earlier one may still be under way on the server.
_SETTLING_SECONDS = 5.0
_INTERVAL = 0.2
_SLOWEST_INTERVAL = 2.0
#: Tries to remove what is busy.
_REMOVALS = 20
#: Names of which this object knows that nothing is under way.
_REMEMBERED = 4096


class Fleet:
    """Everything that is a sandbox on the server."""

    keeper: Keeper

    def __init__(self, server: Server, agents: Agents, gateway: str, *, lifetime: int, rules: bool) -> None:
        self._server = server
        self._agents = agents
        self._gateway = gateway
        self._lifetime = lifetime
        self._rules = rules
        self._opened = asyncio.get_running_loop().time()
        self._posting: set[asyncio.Task[str]] = set()
        self._settled: OrderedDict[Name, None] = OrderedDict()

    async def close(self) -> None:
        for task in self._posting:
            task.cancel()
        if self._posting:
            await asyncio.wait(self._posting)

    # Making.

    def body(
        self,
        name: Name,
        model: Model,
        resources: Resources,
        *,
        snapshot: str | None,
        network: Mapping[str, object] | None,
    ) -> dict[str, object]:
        """What a create asks of the server."""
        limits = {"cpu": str(resources.cpu_count), "memory": f"{resources.memory_mb}Mi"}
        if model.settings.gpu is not None:
            limits["gpu"] = model.settings.gpu
        body: dict[str, object] = {
            "entrypoint": _FIRST_PROGRAM,
            "resourceLimits": limits,
            "timeout": self._lifetime,
            "env": dict(self._agents.environment(name)),
            "metadata": labels(name),
        }
        if snapshot is not None:
            body["snapshotId"] = snapshot
        else:
            body["image"] = _image(model)
        if self._rules:
            # Also where everything is open: rules can be changed later only for one that was made with some.
            body["networkPolicy"] = dict(network) if network is not None else policy(Egress())
        return body

    async def make(self, name: Name, body: Mapping[str, object], model: Model) -> tuple[str, AgentAddress]:
        """The id of a new sandbox and its agent, which accepts calls; or nothing at all."""
        self.keeper.expect(name)
        self._settled.pop(name, None)
        posting = asyncio.create_task(self._post(name, body, model))
        self._posting.add(posting)
        try:
            # Not cancelled with its caller: the server would go on, and nobody would know.
            sandbox = await asyncio.shield(posting)
            address = await self._agents.start(name, sandbox, model.settings)
        except BaseException as error:
            made = posting.done() and not posting.cancelled() and posting.exception() is None
            if made and isinstance(error, Internal | Unavailable):
                _log.error("%s: its log ends: %s", name.sandbox, await self._server.log(posting.result()))
            await to_its_end(self._give_up(name, posting))
            raise
        finally:
            if posting.done():
                self._posting.discard(posting)
        self.keeper.keep(sandbox)
        self._remember(name)
        return sandbox, address

    async def _post(self, name: Name, body: Mapping[str, object], model: Model) -> str:
        limit = _RUNNING_LIMIT
        try:
            details = await self._server.create(body)
        except Lost:
            details = await self._reconciled(name)
            limit = _FOUND_RUNNING_LIMIT
        except Refused as refused:
            if "IMAGE_PULL_FAILED" in refused.code:
                _log.error("the server cannot get the image of template '%s': %s", model.name, refused)
                if model.by_reference:
                    raise NotFound(f"the image '{model.name}' does not exist or cannot be had") from refused
                raise Internal(f"the image of template '{model.name}' cannot be had") from refused
            raise
        sandbox = str(details["id"])
        try:
            await self._until_running(details, limit=limit)
        except BaseException:
            with contextlib.suppress(Refused, SandgateError):
                await self._server.delete(sandbox)
            self.keeper.look_for(name)
            raise
        return sandbox

    async def _reconciled(self, name: Name) -> Details:
        """What a create has made whose answer was lost. Raises Unavailable when it has made nothing so far."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _RECONCILE_SECONDS
        while True:
            # The server may be on its way up again.
            with contextlib.suppress(Refused, Unavailable):
                if found := await self.find(name):
                    return found[0]
            if loop.time() > end:
                raise Unavailable("the OpenSandbox server did not say what became of the sandbox")
            await asyncio.sleep(_INTERVAL)

    async def _until_running(self, details: Details, *, limit: float) -> None:
        pause = _INTERVAL
        sandbox = str(details["id"])
        try:
            async with asyncio.timeout(limit):
                while state_of(details) != "Running":
                    if has_ended(details):
                        _log.error("a sandbox ended at once: %s", details.get("status"))
                        raise Internal("the sandbox could not be started")
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _SLOWEST_INTERVAL)
                    found = await self._server.get(sandbox)
                    if found is None:
                        raise Internal("the sandbox could not be started")
                    details = found
        except TimeoutError:
            raise Unavailable("the sandbox did not come up in time") from None

    async def _give_up(self, name: Name, posting: asyncio.Task[str]) -> None:
        """Nothing of it is left when this returns, or it is looked for until it appears."""
        await self._agents.forget(name)
        await asyncio.wait({posting}, timeout=_POST_PATIENCE)
        if not posting.done():
            posting.add_done_callback(self._posting.discard)
            posting.add_done_callback(_look_at)
            self.keeper.look_for(name)
            return
        if posting.cancelled() or isinstance(failure := posting.exception(), Unavailable):
            self.keeper.look_for(name)
        elif failure is None:
            try:
                await self._remove(posting.result())
            except (Refused, SandgateError):
                self.keeper.look_for(name)
                return
            self._remember(name)
        else:
            # Refused: the server has made nothing, or has cleared away what it had.
            self._remember(name)

    # Finding.

    async def find(self, name: Name) -> Sequence[Details]:
        """Everything of this name: one, as a rule."""
        return await self._server.list(labels(name))

    async def ours(self) -> Sequence[Details]:
        return await self._server.list({"sandgate-gateway": self._gateway})

    async def existing(self, sandbox: str | None) -> Details:
        """Raises NotFound for one that is gone or has ended."""
        details = None if sandbox is None else await self._server.get(sandbox)
        if details is None:
            raise NotFound("there is no such sandbox")
        if has_ended(details):
            raise NotFound("the sandbox has ended")
        return details

    async def settled(self, sandbox: str, *, passing: frozenset[str]) -> str:
        """Its state once it is none of ``passing``: on Kubernetes, changes take their time."""
        pause = _INTERVAL
        try:
            async with asyncio.timeout(_RUNNING_LIMIT):
                while (state := state_of(await self.existing(sandbox))) in passing:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _SLOWEST_INTERVAL)
        except TimeoutError:
            raise Unavailable("the sandbox does not change its state in time") from None
        return state

    # Removing.

    async def erase(self, name: Name, sandbox: str | None) -> bool:
        """Remove a sandbox. Whether there was any.

        By its name also where its id is known: one that was started anew on its files has another.
        """
        await self._agents.forget(name)
        if sandbox is not None:
            await self._remove(sandbox)
            await self.erase_all(name)
            self._remember(name)
            return True
        loop = asyncio.get_running_loop()
        end = self._opened + _SETTLING_SECONDS
        while True:
            if await self.erase_all(name):
                return True
            if name in self._settled:
                return False
            if loop.time() > end:
                break
            await asyncio.sleep(_INTERVAL)
        self.keeper.look_for(name)
        return False

    async def erase_all(self, name: Name) -> bool:
        """Everything of this name that there is now."""
        found = await self.find(name)
        for details in found:
            await self._remove(str(details["id"]))
        return bool(found)

    async def _remove(self, sandbox: str) -> None:
        for _ in range(_REMOVALS):
            try:
                await self._server.delete(sandbox)
                break
            except Refused as refused:
                # Somebody else is removing it, or it is between two states.
                if refused.status != 409 and not _is_being_removed(refused):
                    raise
            await asyncio.sleep(_INTERVAL)
            if await self._server.get(sandbox) is None:
                break
        else:
            with told():
                await self._server.delete(sandbox)
        self.keeper.let_go(sandbox)
        await self._until_gone(sandbox)

    async def _until_gone(self, sandbox: str) -> None:
        """A pod takes a while to end; nothing of it is left when a destroy returns."""
        pause = 0.0
        try:
            async with asyncio.timeout(_RUNNING_LIMIT):
                while await self._server.get(sandbox) is not None:
                    pause = min(2 * pause + _INTERVAL, _SLOWEST_INTERVAL)
                    await asyncio.sleep(pause)
        except TimeoutError:
            raise Unavailable("the sandbox does not end in time") from None

    def _remember(self, name: Name) -> None:
        self._settled[name] = None
        while len(self._settled) > _REMEMBERED:
            self._settled.popitem(last=False)


def _image(model: Model) -> dict[str, object]:
    image: dict[str, object] = {"uri": model.settings.image}
    registry = model.settings.registry
    if registry is not None:
        image["auth"] = {"username": registry.username, "password": registry.password.get_secret_value()}
    return image


def _is_being_removed(refused: Refused) -> bool:
    """Docker's way to say so, which the server passes on as an error of its own."""
    return refused.status == 500 and (
        "already in progress" in refused.message or "No such container" in refused.message
    )


def _look_at(task: asyncio.Task[str]) -> None:
    """So that nobody complains about an error that nobody waits for."""
    if not task.cancelled() and (failure := task.exception()) is not None:
        _log.info("a create that was given up failed: %s", failure)
