"""A collector of spans: a server of OTLP over HTTP, and what processes have exported to it."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

Value = str | int | bool | float


class Link(NamedTuple):
    place: str  # of the other span
    attributes: Mapping[str, Value]


class Span(NamedTuple):
    """A span as it was exported."""

    service: str
    name: str
    kind: int
    trace_id: str
    id: str
    parent: str  # empty for the first of a trace
    failed: bool
    attributes: Mapping[str, Value]
    links: list[Link]
    place: str  # its traceparent, without the flags: OTLP has none of them


class Collector:
    """What was exported by now."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.spans: list[Span] = []
        self.paths: set[str] = set()


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that takes everything, until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                content = gzip.decompress(content)
            collector.paths.add(self.path)
            collector.spans.extend(_spans(ExportTraceServiceRequest.FromString(content)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server.server_port)
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for of_resource in request.resource_spans:
        service = str(_attributes(of_resource.resource)["service.name"])
        for span in (span for of_scope in of_resource.scope_spans for span in of_scope.spans):
            yield Span(
                service=service,
                name=span.name,
                kind=span.kind,
                trace_id=span.trace_id.hex(),
                id=span.span_id.hex(),
                parent=span.parent_span_id.hex(),
                failed=span.status.code == span.status.STATUS_CODE_ERROR,
                attributes=_attributes(span),
                links=[Link(_place(one), _attributes(one)) for one in span.links],
                place=_place(span),
            )


def _place(of: Any) -> str:
    return f"00-{of.trace_id.hex()}-{of.span_id.hex()}"


def _attributes(of: Any) -> dict[str, Value]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in of.attributes}
