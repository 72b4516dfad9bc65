"""The command line's way to a running gateway: gRPC to its core, on the core's own socket.

The proof is the internal token from the state directory, so whoever may read that directory may manage the gateway, and
nobody else.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import grpc

from sandgate import runtime, state
from sandgate_api.core.v1 import audit_pb2_grpc, keys_pb2_grpc, sandboxes_pb2_grpc, teams_pb2_grpc
from sandgate_errors import FailedPrecondition, SandgateError
from sandgate_errors.grpc import from_status

__all__ = ["Core", "connected", "expect_gateway"]

#: Killing may take the core some time; everything else is a matter of milliseconds.
_TIMEOUT = 120.0

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


class Core:
    """The core's services, and the one way to call them."""

    def __init__(self, channel: grpc.Channel, internal_token: str) -> None:
        self.sandboxes = sandboxes_pb2_grpc.SandboxServiceStub(channel)
        self.keys = keys_pb2_grpc.KeyServiceStub(channel)
        self.audit = audit_pb2_grpc.AuditServiceStub(channel)
        self.teams = teams_pb2_grpc.TeamServiceStub(channel)
        self._metadata = (("internal-token", internal_token),)

    def ask(self, method: grpc.UnaryUnaryMultiCallable[_Request, _Reply], request: _Request) -> _Reply:
        """Call a method. What the core refuses is raised as the error it was."""
        try:
            return method(request, metadata=self._metadata, timeout=_TIMEOUT)
        except grpc.RpcError as error:
            raise _translated(error) from error


@contextlib.contextmanager
def connected(state_dir: Path) -> Iterator[Core]:
    """The core of the gateway that runs on a state directory."""
    path = expect_gateway(state_dir)
    token = state.read_private(state_dir / state.TOKEN)
    # A proxy of the environment is not for a socket on this machine.
    with grpc.insecure_channel(f"unix:{path}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        yield Core(channel, token)


def expect_gateway(state_dir: Path) -> Path:
    """The socket of the core. Says when no gateway runs, in place of the refusal that gRPC would describe at length."""
    path = runtime.core_socket(state_dir)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(5)
            probe.connect(str(path))
    except PermissionError:
        raise FailedPrecondition(f"state directory {state_dir} belongs to another user") from None
    except OSError:
        raise FailedPrecondition(
            f"no gateway is running on state directory {state_dir}: start one with 'sandgate serve', "
            "or name its directory with --state-dir"
        ) from None
    return path


def _translated(error: grpc.RpcError) -> SandgateError:
    # What a sync stub raises is a Call too; grpc's own types do not say so.
    assert isinstance(error, grpc.Call)  # noqa: S101
    return from_status(error.code(), error.details() or "no details", dict(error.trailing_metadata() or ()))
