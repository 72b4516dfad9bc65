"""Downloads from an agent that takes calls and answers none, as one that root has stopped inside its sandbox (R5)."""

from __future__ import annotations

import asyncio

import pytest

from sandgate_api.agent.v1 import agent_pb2


@pytest.mark.parametrize("headers", [{}, {"Range": "bytes=0-9"}, {"Accept-Encoding": "gzip"}], ids=str)
async def test_download_without_an_answer_is_given_up(edge, monkeypatch, headers):
    async def silent(_request, _context):
        await asyncio.Event().wait()
        yield agent_pb2.ReadFileResponse()

    monkeypatch.setattr("sandgate_edge.routing.FIRST_MESSAGE_SECONDS", 0.2)
    edge.agent.on["ReadFile"] = silent
    reply = await edge.ask("/files?path=/x", method="GET", headers=headers)
    assert (reply.status, reply.json()["port"]) == (502, 49983)
    await asyncio.wait_for(edge.agent.ended.wait(), 20)


async def test_content_may_take_its_time(edge, monkeypatch):
    async def slow(_request, _context):
        yield agent_pb2.ReadFileResponse(header=agent_pb2.ReadFileResponse.Header(path="/x", name="x", size=2))
        await asyncio.sleep(0.8)
        yield agent_pb2.ReadFileResponse(data=b"hi")

    monkeypatch.setattr("sandgate_edge.routing.FIRST_MESSAGE_SECONDS", 0.3)
    edge.agent.on["ReadFile"] = slow
    reply = await edge.ask("/files?path=/x", method="GET")
    assert (reply.status, reply.body) == (200, b"hi")
