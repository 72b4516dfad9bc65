"""The process backend with one fault, which the setting ``fault`` names: each breaks one promise and keeps all others."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from pathlib import Path

from sandgate_errors import Internal, InvalidArgument
from sandgate_plugin_api import AgentFeature, Capability, Usage, hookimpl
from sandgate_plugin_process.backend import ProcessBackend
from sandgate_plugin_process.standstill import record_of

ALL = Usage(
    cpu_count=1, cpu_used_pct=50.0, mem_total=2**28, mem_used=2**27, mem_cache=0, disk_used=2**20, disk_total=2**30
)
#: What is claimed with a fault and not kept.
CLAIMED = {
    "no rules": Capability.NETWORK_RULES,
    "limits of a create": Capability.LIMITS,
    "limits after a pause": Capability.LIMITS,
    "limits of a copy": Capability.LIMITS,
    "usage is always the same": Capability.LIMITS,
    "usage is the machine's": Capability.LIMITS,
    "address without a network": Capability.NO_INTERNET,
}


class Lying(ProcessBackend):
    name = "lying"

    def __init__(self, context):
        settings = dict(context.settings)
        self.fault = settings.pop("fault", "")
        self.named, self.shown = {}, []
        super().__init__(dataclasses.replace(context, settings=settings))

    async def open(self):
        await super().open()
        if self.fault in CLAIMED:
            self.capabilities |= {CLAIMED[self.fault]}
        if self.fault == "lacks nothing of what it says":
            self.lacks = frozenset(AgentFeature)
        if self.fault == "not bound to its host":
            self.host_bound = False

    async def find_template(self, name):
        if self.fault == "any name is a template":
            return (await self.templates())[0]
        if self.fault == "aliases lead nowhere" and name != "base":
            return None
        if self.fault == "a name breaks it" and "\0" in name:
            raise ValueError(name)
        return await super().find_template(name)

    async def templates(self):
        found = await super().templates()
        if self.fault == "aliases lead nowhere":
            return [dataclasses.replace(template, aliases=("other",)) for template in found]
        return found

    async def create(self, request, handle):
        if self.fault == "metadata is read" and len(request.metadata) > 1:
            raise Internal("no such label")
        if self.fault == "names are refused late" and "/" in request.name:
            raise InvalidArgument("no such name")
        if self.fault == "a name takes over":
            if (other := self.named.pop(request.name, None)) is not None:
                await self.destroy(other)
            if request.name:
                self.named[request.name] = handle
        if self.fault == "address without a network":
            request = dataclasses.replace(request, allow_internet_access=True)
        placement = await super().create(request, handle)
        if self.fault == "limits of a create" or (self.fault == "limits of a copy" and request.snapshot):
            self.lift(handle)
        if self.fault == "token in a command line":
            words = ["sh", "-c", "sleep 30; :", placement.agent.token]
            self.shown.append(await asyncio.create_subprocess_exec(*words, cwd="/", env={}))
        return placement

    def lift(self, handle):
        whole = Path(record_of(self._shelf.find(handle)).groups["memory"])
        # Version 1 lets no part have more than the whole, nor memory more than memory and swap together.
        for group in (whole, whole / "user"):
            for name in ("memory.max", "memory.memsw.limit_in_bytes", "memory.limit_in_bytes"):
                if (group / name).exists():
                    (group / name).write_text("max" if name == "memory.max" else "-1")

    async def destroy(self, handle):
        for process in self.shown:
            process.kill()
            await process.wait()
        self.shown.clear()
        await super().destroy(handle)

    async def survey(self):
        if self.fault == "blocks":
            time.sleep(4)  # noqa: ASYNC251 - the fault
        return await super().survey()

    async def pause(self, handle, *, memory):
        if self.fault == "pauses nothing" and memory:
            return handle
        return await super().pause(handle, memory=memory)

    async def resume(self, handle):
        if self.fault == "a cancelled resume ends it":
            try:
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                await self.destroy(handle)
                raise
        placement = await super().resume(handle)
        if self.fault == "limits after a pause":
            self.lift(handle)
        return placement

    async def snapshot(self, handle, *, snapshot_id):
        if self.fault == "a cancelled snapshot is kept":
            keeping = asyncio.ensure_future(super().snapshot(handle, snapshot_id=snapshot_id))
            try:
                return await asyncio.shield(keeping)
            except asyncio.CancelledError:
                await asyncio.wait({keeping})
                raise
        if self.fault == "a snapshot ends processes":
            await super().pause(handle, memory=False)
            await super().resume(handle)
        return await super().snapshot(handle, snapshot_id=snapshot_id)

    async def update_egress(self, handle, egress):
        if self.fault != "no rules":
            await super().update_egress(handle, egress)

    async def usage(self, handle):
        match self.fault:
            case "usage is impossible":
                return dataclasses.replace(ALL, cpu_used_pct=250.0)
            case "usage is always the same" | "usage of what is gone":
                return ALL
            case "usage is the machine's":
                return None
        return await super().usage(handle)

    async def address(self, handle):
        match self.fault:
            case "address of everybody":
                return "127.0.0.1"
            case "address of another" | "address without a network":
                return "192.0.2.7"
            case "address of what is gone" if self._shelf.find(handle) is None:
                return "192.0.2.7"
        return None


@hookimpl
def sandgate_register_backends(registrar):
    registrar.add(Lying)
