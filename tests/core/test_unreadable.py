"""Bytes that are no message of the method they are sent to: the caller's mistake, in the taxonomy's words and not in the log.

gRPC's library reads messages before any handler runs; left to it, strangers were answered in its own words, and each wrote
a traceback.
"""

from __future__ import annotations

import logging

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from sandgate_api.core.v1 import audit_pb2, edges_pb2, keys_pb2, logs_pb2, peers_pb2, sandboxes_pb2, teams_pb2

#: Field 1 as a group that never ends.
UNREADABLE = b"\x0b" * 20
SERVICES = [
    service
    for module in (audit_pb2, edges_pb2, keys_pb2, logs_pb2, peers_pb2, sandboxes_pb2, teams_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
METHODS = [(service.full_name, method) for service in SERVICES for method in service.methods]


async def status_of(client, path: str, *, streams: bool = False, data: bytes = UNREADABLE) -> grpc.StatusCode:
    try:
        if streams:
            call = client.channel.stream_stream(path)(iter([data]), metadata=client.credentials, timeout=20)
            async for _ in call:
                pass
        else:
            await client.channel.unary_unary(path)(data, metadata=client.credentials, timeout=20)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_no_method_takes_them_and_none_fails_over_them(core, caplog):
    caplog.set_level(logging.WARNING)
    for service, method in METHODS:
        path = f"/{service}/{method.name}"
        streams = method.client_streaming
        assert await status_of(core.client(), path, streams=streams) is grpc.StatusCode.UNAUTHENTICATED, path
        refused = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED}
        assert await status_of(core.owner, path, streams=streams) in refused, path
        if not streams:
            assert await status_of(core.internal, path) is grpc.StatusCode.INVALID_ARGUMENT, path
    assert caplog.records == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_they_are_no_change_for_the_audit(core):
    await status_of(core.owner, "/sandgate_api.core.v1.SandboxService/Kill")
    assert not (await core.internal.call("ListAudit")).entries


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_health_knows_no_service_of_that_name(core, caplog):
    caplog.set_level(logging.WARNING)
    stranger = core.client()
    assert await status_of(stranger, "/grpc.health.v1.Health/Check") is grpc.StatusCode.NOT_FOUND
    watch = stranger.channel.unary_stream("/grpc.health.v1.Health/Watch")(UNREADABLE, timeout=20)
    answer = health_pb2.HealthCheckResponse.FromString(await watch.read())
    assert answer.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()
    assert caplog.records == []
