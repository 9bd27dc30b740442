"""Spans of OpenTelemetry: a request of the service, an append, a batch of a sink. All their names are in this module,
because the semantic conventions of HTTP and messaging still change.

A process exports spans if it has the extra ``otel``, and the environment names a collector, by
OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT. Otherwise nothing of OpenTelemetry is imported. An
application that has set a tracer provider keeps it. Nothing waits for a collector: what it does not take is dropped.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from outbox.base import trace
from outbox.base.errors import Failure
from outbox.base.trace import SampledEvents

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Link, Span, SpanContext, Tracer

ID_MAX_BYTES = 36  # of a UUID
FLUSH_TIMEOUT_S = 3.0  # at the end of a process; the SDK's own shutdown may take 30 s
Attributes = Mapping[str, str | int]


@contextmanager
def exported(service: str) -> Iterator[None]:
    """Export the spans of the block, if the environment names a collector. Variables that cannot be used are a warning.

    ``service`` names the process, unless the environment does. Enter this behind a fork: threads do not survive one.
    """
    endpoint = _variable("ENDPOINT")
    is_off = (
        os.environ.get("OTEL_TRACES_EXPORTER") == "none" or "true" in os.environ.get("OTEL_SDK_DISABLED", "").lower()
    )
    provider = _provider(service, endpoint) if endpoint and not is_off else None
    try:
        yield
    finally:
        if provider is not None:
            flushing = threading.Thread(target=provider.shutdown, daemon=True)
            flushing.start()
            flushing.join(FLUSH_TIMEOUT_S)


def are_recorded() -> bool:
    """Whether the process has a tracer provider, ours or the application's."""
    return _tracer() is not None


@dataclass
class Request:
    """A request under way, and the traceparent of its span. The adapter sets route and status once it knows them."""

    traceparent: str | None
    route: str | None = None
    status: int | None = None


@contextmanager
def request(method: str, path: str, traceparent: str | None) -> Iterator[Request]:
    """The span of a request, in the caller's trace. If the application has a current span, that takes its place."""
    tracer = _tracer()
    if tracer is None:
        yield Request(traceparent)
        return
    from opentelemetry.trace import NonRecordingSpan, get_current_span, set_span_in_context

    current = _traceparent(get_current_span())
    if current is not None:
        yield Request(current)
        return
    caller = trace.valid(traceparent)
    context = None if caller is None else set_span_in_context(NonRecordingSpan(_span_context(caller)))
    attributes = {"http.request.method": method, "url.path": path}
    with _span(tracer, method, "SERVER", attributes, context=context) as span:
        yield (answered := Request(_traceparent(span)))
        if answered.route is not None:
            span.update_name(f"{method} {answered.route}")
            span.set_attribute("http.route", answered.route)
        if answered.status is not None:
            span.set_attribute("http.response.status_code", answered.status)
            if answered.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                _fail(span, str(answered.status))


@contextmanager
def appended(topics: Collection[str], count: int) -> Iterator[str | None]:
    """The span of an append of events of these topics. Yields the traceparent for the events; None without a span."""
    tracer = _tracer()
    if tracer is None:
        yield None
        return
    attributes = _messaging("append", "send", topic := "|".join(sorted(topics)), count)
    with _span(tracer, f"append {topic}", "PRODUCER", attributes) as span:
        yield _traceparent(span)


@contextmanager
def batch(sink: str, topic: str, count: int, sampled: SampledEvents) -> Iterator[dict[str, int]]:
    """The span of a batch, in a trace of its own, with links to sampled events. Yields a dict for its counts."""
    counts: dict[str, int] = {}
    tracer = _tracer()
    if tracer is None or not count:
        yield counts
        return
    from opentelemetry.context import Context

    attributes = {**_messaging("apply", "process", topic, count), "outbox.sink": sink}
    links = _links(sampled)
    if sampled.total > len(links):
        attributes["outbox.links.left_out"] = sampled.total - len(links)
    with _span(tracer, f"apply {topic}", "CONSUMER", attributes, context=Context(), links=links) as span:
        yield counts
        span.set_attributes({f"outbox.batch.{name}": number for name, number in counts.items()})


def _variable(name: str) -> str | None:
    """A variable of the exporter: that of traces, or else that of all signals."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}")


def _provider(service: str, endpoint: str) -> TracerProvider | None:
    """A new provider, set as that of the process. None if the application has set one, or ours cannot be."""
    try:
        if not endpoint.startswith("http") or (_variable("PROTOCOL") or "http/protobuf") != "http/protobuf":
            raise ValueError("the protocol must be http/protobuf, and the endpoint an http URL")
        from opentelemetry import trace as api
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if are_recorded():
            return None
        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": service}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except Exception as error:
        hint = "install the extra `otel`: " if isinstance(error, ImportError) else ""
        logging.getLogger(__name__).warning("no spans are exported: %s%s", hint, error)
        return None
    api.set_tracer_provider(provider)
    return provider


def _tracer() -> Tracer | None:
    """The tracer of this module; None as long as nobody has set a tracer provider."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None or isinstance(provider := api.get_tracer_provider(), api.ProxyTracerProvider):
        return None
    tracer: Tracer = provider.get_tracer("outbox")
    return tracer


@contextmanager
def _span(
    tracer: Tracer,
    name: str,
    kind: str,
    attributes: Attributes,
    *,
    context: Context | None = None,
    links: Sequence[Link] = (),
) -> Iterator[Span]:
    """A span, current in the block. It gets the class or code of an error, and not the text: that may be personal."""
    from opentelemetry.trace import SpanKind

    with tracer.start_as_current_span(
        name, context, SpanKind[kind], attributes, links, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield span
        except BaseException as error:
            _fail(span, error.code if isinstance(error, Failure) else type(error).__name__)
            raise


def _fail(span: Span, what: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", what)
    span.set_status(StatusCode.ERROR)


def _messaging(operation: str, type_: str, topic: str, count: int) -> dict[str, str | int]:
    return {
        "messaging.system": "kafka",
        "messaging.operation.name": operation,
        "messaging.operation.type": type_,
        "messaging.destination.name": topic,
        "messaging.batch.message_count": count,
    }


def _links(sampled: SampledEvents) -> list[Link]:
    from opentelemetry.trace import Link

    now_ms, links = time.time_ns() // 1_000_000, list[Link]()
    for traceparent, event_id, recorded_ms in sampled.first:
        if trace.is_sampled(context := traceparent.decode(errors="replace")):
            named = (event_id or b"")[:ID_MAX_BYTES].decode(errors="replace")
            attributes: Attributes = {"messaging.message.id": named, "outbox.lag_ms": max(now_ms - recorded_ms, 0)}
            links.append(Link(_span_context(context), attributes))
    return links


def _span_context(traceparent: str) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    _, trace_id, parent_id, flags = (int(part, 16) for part in traceparent.split("-"))
    return SpanContext(trace_id, parent_id, is_remote=True, trace_flags=TraceFlags(flags))


def _traceparent(span: Span) -> str | None:
    found = span.get_span_context()
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}" if found.is_valid else None
