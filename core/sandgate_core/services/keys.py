"""``KeyService``: API keys, for the gateway's own command line."""

from __future__ import annotations

from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from sandgate_api.core.v1 import keys_pb2, keys_pb2_grpc
from sandgate_core.callers import DEFAULT_OWNER, current
from sandgate_core.keys import KeyRecord, Keys

__all__ = ["KeyService"]


class KeyService(keys_pb2_grpc.KeyServiceServicer):
    """protobuf <-> :class:`sandgate_core.keys.Keys`."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def CreateKey(self, request: keys_pb2.CreateKeyRequest, context: Any) -> keys_pb2.CreateKeyResponse:  # noqa: N802
        current().must_be_internal()
        owner = request.owner or DEFAULT_OWNER
        key, secret = await self._keys.create(
            name=request.name, owner=owner, create_team=request.create_team or owner == DEFAULT_OWNER
        )
        return keys_pb2.CreateKeyResponse(key=_message_of(key), secret=secret)

    async def ListKeys(self, request: keys_pb2.ListKeysRequest, context: Any) -> keys_pb2.ListKeysResponse:  # noqa: N802
        current().must_be_internal()
        return keys_pb2.ListKeysResponse(keys=map(_message_of, self._keys.list(owner=request.owner)))

    async def RevokeKey(self, request: keys_pb2.RevokeKeyRequest, context: Any) -> keys_pb2.RevokeKeyResponse:  # noqa: N802
        current().must_be_internal()
        await self._keys.revoke(request.id, owner=request.owner)
        return keys_pb2.RevokeKeyResponse()

    async def RenameKey(self, request: keys_pb2.RenameKeyRequest, context: Any) -> keys_pb2.RenameKeyResponse:  # noqa: N802
        current().must_be_internal()
        key = await self._keys.rename(request.id, name=request.name, owner=request.owner)
        return keys_pb2.RenameKeyResponse(key=_message_of(key))


def _message_of(key: KeyRecord) -> keys_pb2.Key:
    return keys_pb2.Key(
        id=key.id,
        name=key.name,
        owner=key.owner,
        prefix=key.prefix,
        created_at=_timestamp(key.created_at),
        last_used_at=None if key.last_used_at is None else _timestamp(key.last_used_at),
    )


def _timestamp(microseconds: int) -> Timestamp:
    message = Timestamp()
    message.FromMicroseconds(microseconds)
    return message
