"""The spans of a service, as a collector gets them, and what a collector that is away does to the service."""

from __future__ import annotations

import socket
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Proto

from outbox.base import project, spans, trace
from outbox.base.settings import Settings
from outbox.migrations.migrate import migrate
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.fixtures.stack import private_stack
from outbox_lab.testing.helpers import query
from outbox_lab.testing.homes import Homes
from tests.stock import move, serving
from tests.support.collector import Collector, Span, collecting
from tests.support.services import SERVICES, project_of

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PARENT = "00f067aa0ba902b7"
WORKERS = 2  # each exports its own spans
OF_WORKERS = 20  # movements, so that each worker makes some


@pytest.fixture(scope="module")
def private(homes: Homes) -> Iterator[Settings]:
    """A Postgres for a service of two worker processes."""
    stack: Stack = private_stack(homes.new("spans"), service_workers=WORKERS)
    stack.up(only=["postgres"])
    try:
        migrate(stack.settings)
        yield stack.settings
    finally:
        stack.down()


@pytest.fixture(params=[*SERVICES.values()], ids=[*SERVICES])
def either(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service is that of each framework."""
    monkeypatch.setenv(project.VARIABLE, str(project_of(request.param, tmp_path)))


def status(settings: Settings, **request: Any) -> int:
    """The status of the response to a movement."""
    return move(settings, **request).status_code


def written(settings: Settings) -> list[str | None]:
    """The traceparents of all events."""
    return [traceparent for (traceparent,) in query(settings, "SELECT traceparent FROM outbox ORDER BY id")]


def of_trace(collector: Collector, trace_id: str) -> list[Span]:
    """The spans of a trace, the request before its append."""
    return sorted((span for span in collector.spans if span.trace_id == trace_id), key=lambda span: span.kind)


@pytest.mark.usefixtures("either")
def test_one_trace_leads_from_the_request_to_its_event(private: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled, unsampled, refused, failed = (uuid.uuid4().hex for _ in range(4))
    before = len(written(private))
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        with serving(private) as process:
            started = len(process.log_file.read_text())
            assert status(private, traceparent=f"00-{sampled}-{PARENT}-01") == 201
            assert status(private, traceparent=f"00-{unsampled}-{PARENT}-00") == 201
            assert status(private) == 201
            assert status(private, quantity=0, traceparent=f"00-{refused}-{PARENT}-01") == 422
            log = process.log_file.read_text()[started:]
            assert [status(private) for _ in range(OF_WORKERS)] == [201] * OF_WORKERS
            query(private, "ALTER TABLE outbox RENAME TO outbox_away")
            try:
                assert status(private, traceparent=f"00-{failed}-{PARENT}-01") == 500
            finally:
                query(private, "ALTER TABLE outbox_away RENAME TO outbox")
        # A span waits up to 5 s for others: the last ones came when the worker ended.
        assert collector.paths == {"/v1/traces"}
        request, append = of_trace(collector, sampled)
        assert (request.name, request.kind, request.parent) == ("POST /movements", Proto.SPAN_KIND_SERVER, PARENT)
        assert request.attributes == {
            "http.request.method": "POST",
            "http.route": "/movements",
            "http.response.status_code": 201,
            "url.path": "/movements",
        }
        assert request.service == f"{private.topic_prefix}-service"
        topic = f"{private.topic_prefix}.item"
        assert (append.name, append.kind, append.parent) == (f"append {topic}", Proto.SPAN_KIND_PRODUCER, request.id)
        assert append.attributes == {
            "messaging.system": "kafka",
            "messaging.operation.name": "append",
            "messaging.operation.type": "send",
            "messaging.destination.name": topic,
            "messaging.batch.message_count": 1,
        }
        of_sampled, of_unsampled, of_none, *_ = written(private)[before:]
        assert of_sampled is not None
        assert of_sampled[:-3] == append.place
        assert trace.is_sampled(of_sampled)
        assert trace.trace_id(of_unsampled) == unsampled
        assert not trace.is_sampled(of_unsampled)
        assert of_trace(collector, unsampled) == []
        begun, own = of_trace(collector, str(trace.trace_id(of_none)))
        assert (begun.parent, own.parent) == ("", begun.id), "a request without one begins a trace"
        (rejected,) = of_trace(collector, refused)
        assert (rejected.attributes["http.response.status_code"], rejected.failed) == (422, False)
        request, append = of_trace(collector, failed)
        assert (request.failed, request.attributes["error.type"]) == (True, "500")
        assert (append.failed, append.attributes["error.type"]) == (True, "ProgrammingError")
        sent = Counter(span.name for span in collector.spans)
        assert sent == {"POST /movements": OF_WORKERS + 4, f"append {topic}": OF_WORKERS + 3}, (
            "of all workers, none of probes"
        )
    assert sampled in log
    assert "Traceback" not in log


def test_a_collector_that_never_answers_holds_nothing_up(private: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    private = private.replace(service_workers=1)
    before = len(written(private))
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{deaf.getsockname()[1]}")
        with serving(private) as process:
            for _ in range(30):
                began = time.monotonic()
                assert status(private) == 201
                assert time.monotonic() - began < 5
            began = time.monotonic()
            process.stop()
            assert time.monotonic() - began < spans.FLUSH_TIMEOUT_S + 5, "the SDK alone would wait for 30 s"
    assert len(written(private)) == before + 30
