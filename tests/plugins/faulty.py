"""A backend that is faulty in the way its setting says. It makes nothing, so there is nothing to leave behind."""

from __future__ import annotations

import asyncio

from sandgate_errors import CapabilityMissing
from sandgate_plugin_api import (
    AgentAddress,
    Backend,
    Capability,
    Placement,
    Resources,
    Survivor,
    Template,
    hookimpl,
)

SMALL = Resources(cpu_count=1, memory_mb=64, disk_size_mb=64)
FAULTS = ("create raises", "create hangs", "handle", "address", "token", "type", "exit", "cancel", "reserve raises")


class Faulty(Backend):
    """Templates are named after faults."""

    name = "faulty"
    capabilities = frozenset({Capability.PAUSE, Capability.SNAPSHOT})

    def __init__(self, context):
        self.fault = str(context.settings.get("fault", ""))

    async def open(self):
        if self.fault == "open raises":
            raise ZeroDivisionError("in open")
        if self.fault == "open hangs":
            await asyncio.sleep(10_000)
        if self.fault == "capabilities":
            self.capabilities = ["pause"]
        if self.fault == "lacks":
            self.lacks = {"users"}

    async def close(self):
        if self.fault == "close raises":
            raise ZeroDivisionError("in close")

    async def templates(self):
        if self.fault == "templates raises":
            raise ZeroDivisionError("in templates")
        if self.fault == "templates hangs":
            await asyncio.sleep(10_000)
        if self.fault == "templates of another type":
            return ["base"]
        return [Template(id=fault, resources=SMALL) for fault in FAULTS]

    def reserve(self, request):
        if request.template.id == "reserve raises":
            raise ZeroDivisionError("in reserve")
        return {"box": request.sandbox_id}

    async def create(self, request, handle):
        await asyncio.sleep(0)
        agent = AgentAddress(target="unix:/nonexistent/agent.sock", token="t")
        match request.template.id:
            case "create raises":
                raise ZeroDivisionError("secret text")
            case "create hangs":
                while True:  # It does not obey either.
                    try:
                        await asyncio.sleep(10_000)
                    except asyncio.CancelledError:
                        continue
            case "handle":
                return Placement(handle={"box": object()}, agent=agent)
            case "address":
                return Placement(handle=handle, agent=AgentAddress(target="somewhere", token="t"))
            case "token":
                return Placement(handle=handle, agent=AgentAddress(target=agent.target, token="\n"))
            case "type":
                return {"handle": handle}
            case "exit":
                raise SystemExit(3)
            case "cancel":
                raise asyncio.CancelledError
        return Placement(handle=handle, agent=agent)

    async def locate(self, handle):
        return None

    async def survey(self):
        if self.fault == "survey raises":
            raise ZeroDivisionError("in survey")
        if self.fault == "survey of another type":
            return [Survivor(sandbox_id=None, handle={})]
        return []

    async def destroy(self, handle):
        pass

    async def pause(self, handle, *, memory):
        # Claimed, and refused all the same.
        raise CapabilityMissing.of(self.name, Capability.PAUSE.value)

    async def address(self, handle):
        return "next door"

    @classmethod
    def diagnose(cls, settings):
        raise ZeroDivisionError("in diagnose")


@hookimpl
def sandgate_register_backends(registrar):
    registrar.add(Faulty)
