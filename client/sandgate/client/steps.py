"""What the client's logic asks of the network: the border between what sync and async share and what they do not.

The logic (start, follow, attach again, read a file) is written once, as generators that yield an *effect* and get its
outcome back; no blocking call and no ``await`` stands in it. Two drivers carry effects out: :mod:`.blocking` with the
synchronous gRPC, :mod:`.waiting` with the asynchronous one. Failures are thrown into the generator as errors of the
taxonomy, with :class:`Cut` for a connection that broke.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from sandgate_errors import DeadlineExceeded, Unavailable

__all__ = [
    "OPTIONS",
    "Ask",
    "Cut",
    "Effect",
    "Metadata",
    "Method",
    "NoAnswer",
    "Open",
    "Read",
    "Sleep",
    "Steps",
    "Stream",
    "Upload",
]

_Reply = TypeVar("_Reply", bound=Message)
_Result = TypeVar("_Result")

Metadata = tuple[tuple[str, str | bytes], ...]

#: Of one message, either way; the core's own limit.
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A core is on this machine or network; a proxy of the environment is for the outside.
    ("grpc.enable_http_proxy", 0),
    # A restarted core is found again at once, and one client's back-off is not another's.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A connection that died without a word is noticed after a quarter of a minute, well within the time for which an agent
    # still tells a command's end. The core permits pings this often; see its server's options.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Otherwise a ping of any kind that is under way puts that off for a minute.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class Cut(Unavailable):
    """The connection broke, or there was none; what was under way on it may have had its effect."""


class NoAnswer(DeadlineExceeded):
    """Our own wait for an answer ended; the other side's time limits are DeadlineExceeded itself."""


@dataclass(frozen=True)
class Method(Generic[_Reply]):
    """One method of a service on the core's address."""

    path: str
    reply: type[_Reply]


class Stream(Protocol):
    """An open stream of replies; each driver has its own kind."""

    def close(self) -> None:
        """End the call, also while somebody reads. A second time does nothing."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request, one reply; its outcome is the reply. ``timeout`` is in seconds; None: none."""

    method: Method[Any]
    request: Message
    metadata: Metadata
    timeout: float | None


@dataclass(frozen=True, kw_only=True)
class Upload:
    """Many requests, one reply; its outcome is the reply."""

    method: Method[Any]
    requests: Iterable[Message]
    #: Making the next request may block, as reading from a file does.
    blocking: bool
    metadata: Metadata
    timeout: float | None


@dataclass(frozen=True, kw_only=True)
class Open:
    """One request, many replies; its outcome is a :class:`Stream`."""

    method: Method[Any]
    request: Message
    metadata: Metadata


@dataclass(frozen=True)
class Read:
    """The next reply of a stream; None at its end. Raises NoAnswer after ``timeout`` seconds, and closes it."""

    stream: Stream
    timeout: float | None = None


@dataclass(frozen=True)
class Sleep:
    """Wait for ``seconds``."""

    seconds: float


Effect = Ask | Upload | Open | Read | Sleep
Steps = Generator[Effect, Any, _Result]
