"""A collector of traces: takes OTLP over HTTP, as a real one does, and keeps what it gets."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

__all__ = ["Collector", "Span", "collecting"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """One span; ids in hexadecimal, times in nanoseconds since 1970."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    failed: bool
    attributes: Mapping[str, str]


@dataclass
class Collector:
    """What arrived so far."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)

    def of(self, trace: str) -> list[Span]:
        return [span for span in self.spans if span.trace == trace]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Listens while the block runs."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                collector.spans.extend(_spans_of(ExportTraceServiceRequest.FromString(body)))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _spans_of(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for group in request.resource_spans:
        resource = {pair.key: pair.value.string_value for pair in group.resource.attributes}
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Span(
                    service=resource["service.name"],
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    failed=span.status.code == span.status.STATUS_CODE_ERROR,
                    attributes={
                        pair.key: pair.value.string_value or str(pair.value.int_value) for pair in span.attributes
                    },
                )
