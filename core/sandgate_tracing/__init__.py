"""Traces: the spans of one request from the edge over core and backend to the agent, sent to a collector by OTLP.

Edge and core each have a :class:`Tracing` when the setting `traces` is on, and none at all otherwise: nothing of
OpenTelemetry is imported then. Context travels as W3C Trace Context, from clients in the headers ``traceparent`` and
``tracestate``, between the parts in metadata of the same names. An agent has no exporter and may have no network: it
tells in the trailing metadata ``agent-span`` when it began and ended, and its caller makes a span of that.

Where spans go and which are kept is said by OpenTelemetry's own variables (docs/operations.md).
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc.aio

from sandgate_errors import FailedPrecondition

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["AGENT_SPAN", "TRACE_CONTEXT", "Metadata", "Outgoing", "Tracing", "check", "endpoint"]

Metadata = tuple[tuple[str, str | bytes], ...]

#: When an agent began and ended, in nanoseconds since 1970.
AGENT_SPAN = "agent-span"
_AGENT_SPAN = re.compile(r"([0-9]{1,19})-([0-9]{1,19})", re.ASCII)
#: Keys of headers and metadata (W3C Trace Context).
TRACE_CONTEXT = ("traceparent", "tracestate")
#: The least that the specification asks to pass on. More could make a call's metadata too large for its receiver.
_LONGEST_STATE = 512
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DEFAULT_ENDPOINT = "http://localhost:4318"
#: For the last spans when the process ends.
_FLUSH_SECONDS = 2.0


def endpoint(environment: Mapping[str, str] = os.environ) -> str:
    """Where spans are sent, for people; credentials in the URL are left out."""
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").rstrip("/") or _DEFAULT_ENDPOINT
    url = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or f"{base}/v1/traces"
    return re.sub(r"//[^/@]*@", "//", url)


def check(environment: Mapping[str, str] = os.environ) -> None:
    """Raises FailedPrecondition, in one line, when spans could not be sent as the environment wants it."""
    protocol = next((environment[name] for name in _PROTOCOLS if environment.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        raise FailedPrecondition(f"traces are sent by http/protobuf only, not by {protocol[:40]}")
    exporter = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    if exporter not in {"otlp", "none"}:
        raise FailedPrecondition(f"OTEL_TRACES_EXPORTER may be otlp or none, not {exporter[:40]}")
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401 - whether they are there is the question
    except ImportError:
        raise FailedPrecondition("traces need OpenTelemetry: pip install 'sandgate[otel]'") from None


class Outgoing:
    """One call to another part, from :meth:`Tracing.outgoing` to :meth:`end`."""

    def __init__(self, tracing: Tracing, span: Span, metadata: Metadata) -> None:
        self._tracing = tracing
        self._span = span
        self._began = time.time_ns()
        #: What the call carries besides its own.
        self.metadata = metadata

    @property
    def sampled(self) -> bool:
        """Whether anybody will see it; only then the other side tells of its part."""
        return self._span.get_span_context().trace_flags.sampled

    def follow(self, call: Any) -> None:
        """Ends this when the call of ``grpc.aio`` ends, however it does."""
        call.add_done_callback(lambda _: self._tracing.own(self._end_of(call)))

    async def _end_of(self, call: Any) -> None:
        # The call is over, so neither waits.
        code = await call.code()
        self.end(code=code.name, trailing=await call.trailing_metadata() or ())

    def end(self, *, code: str, trailing: Iterable[tuple[str, str | bytes]] = ()) -> None:
        """``code`` is the gRPC status' name, ``trailing`` the metadata after the answer, as far as there is any."""
        self._span.set_attribute("rpc.response.status_code", code)
        if code not in {"OK", "CANCELLED"}:
            self._tracing.mark_failed(self._span)
        # One: an agent may be in the hands of its sandbox, which could tell of thousands.
        told = next((str(value) for key, value in trailing if key == AGENT_SPAN), None)
        if told is not None:
            self._tracing.add_agent_span(self._span, told, not_before=self._began)
        self._span.end()


class Tracing:
    """Makes the spans of one part and sends them. Made by :meth:`start`, ended by :meth:`close`."""

    def __init__(self, part: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service = os.environ.get("OTEL_SERVICE_NAME") or "sandgate"
        self._trace = trace
        self._context = TraceContextTextMapPropagator()
        self._agent_resource = Resource.create({"service.name": f"{service}-agent"})
        self._processor = BatchSpanProcessor(OTLPSpanExporter())
        # Not its own hook at the interpreter's exit: close() ends it while somebody may still wait for that.
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": f"{service}-{part}", "service.instance.id": str(os.getpid())}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("sandgate")
        #: Ends of calls that are being written down.
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def start(cls, part: str) -> Tracing | None:
        """``part`` names the process. None where the environment turns tracing off. Raises FailedPrecondition."""
        check()
        off = os.environ.get("OTEL_TRACES_EXPORTER") == "none"
        if off or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return None
        return cls(part)

    def close(self) -> None:
        """Sends what is left, within a bound. Blocks."""
        # A collector that does not answer is tried again and again, which must not hold up the end of the process.
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_FLUSH_SECONDS)

    @contextmanager
    def incoming(self, name: str, carried: Mapping[str, str], **attributes: str) -> Iterator[Span]:
        """Around the service of a request: a span below the caller's, and above all that are made inside the block.

        ``carried``: the request's headers or metadata. What is wrong there counts as absent, as W3C has it.
        """
        fields = {key: carried[key] for key in TRACE_CONTEXT if key in carried}
        if len(fields.get("tracestate", "")) > _LONGEST_STATE:
            del fields["tracestate"]
        span = self._tracer.start_span(
            name,
            context=self._context.extract(fields),
            kind=self._trace.SpanKind.SERVER,
            attributes=_dotted(attributes),
        )
        with self._current(span):
            yield span

    @contextmanager
    def inside(self, name: str, **attributes: str) -> Iterator[Span]:
        """Around a piece of our own work."""
        span = self._tracer.start_span(name, attributes=_dotted(attributes))
        with self._current(span):
            yield span

    def outgoing(self, name: str, **attributes: str) -> Outgoing:
        """A call to another part that begins now; to be ended by its maker."""
        span = self._tracer.start_span(name, kind=self._trace.SpanKind.CLIENT, attributes=_dotted(attributes))
        fields: dict[str, str] = {}
        self._context.inject(fields, context=self._trace.set_span_in_context(span))
        return Outgoing(self, span, tuple(fields.items()))

    async def call(self, name: str, method: Any, request: Any, *, metadata: Metadata, timeout: float) -> Any:
        """A unary call, in a span."""
        outgoing = self.outgoing(name)
        call = method(request, metadata=(*metadata, *outgoing.metadata), timeout=timeout)
        code, trailing = "CANCELLED", None
        try:
            answer = await call
            code, trailing = "OK", await call.trailing_metadata()
            return answer
        except grpc.aio.AioRpcError as error:
            code, trailing = error.code().name, error.trailing_metadata()
            raise
        finally:
            outgoing.end(code=code, trailing=trailing or ())

    def own(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a piece of work that nobody waits for; it takes one turn of the loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def mark_failed(self, span: Span) -> None:
        span.set_status(self._trace.StatusCode.ERROR)

    def add_agent_span(self, parent: Span, told: str, *, not_before: int) -> None:
        """The agent's part of the call ``parent``. It comes from inside a sandbox: what cannot be is put right or left out."""
        from opentelemetry.sdk.trace import ReadableSpan

        match = _AGENT_SPAN.fullmatch(told)
        context = parent.get_span_context()
        if match is None or not context.trace_flags.sampled:
            return
        now = time.time_ns()
        length = min(max(0, int(match[2]) - int(match[1])), now - not_before)
        # Within its call: the clocks of two machines differ by more than a call takes.
        began = min(max(int(match[1]), not_before), now - length)
        own = self._trace.SpanContext(
            trace_id=context.trace_id,
            span_id=self._provider.id_generator.generate_span_id(),
            is_remote=False,
            trace_flags=context.trace_flags,
        )
        self._processor.on_end(
            ReadableSpan(
                name=getattr(parent, "name", "call"),
                context=own,
                parent=context,
                resource=self._agent_resource,
                kind=self._trace.SpanKind.SERVER,
                attributes=dict(getattr(parent, "attributes", None) or {}),
                start_time=began,
                end_time=began + length,
            )
        )

    @contextmanager
    def _current(self, span: Span) -> Iterator[None]:
        with self._trace.use_span(span, record_exception=False, set_status_on_exception=False):
            try:
                yield
            except BaseException as error:
                # The class alone: a message may name what the tenant calls its files.
                span.set_attribute("error.type", type(error).__name__)
                # A caller who left, and a refusal that was the caller's fault or will be told by whoever made it.
                if not isinstance(error, asyncio.CancelledError | grpc.aio.AbortError):
                    self.mark_failed(span)
                raise
            finally:
                span.end()


def _dotted(attributes: Mapping[str, str]) -> dict[str, str]:
    """`http_route` -> `http.route`, as keywords have no dots."""
    return {name.replace("_", "."): value for name, value in attributes.items() if value}
