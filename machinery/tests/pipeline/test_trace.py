"""A trace leads from a request to its events on the topic, and to the batches of sinks that apply them."""

from __future__ import annotations

import json
import socket
import time
import uuid
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Proto

from outbox.base.settings import Settings
from tests.stock import move, serving
from tests.support.collector import collecting
from tests.support.sink_driver import Database
from tests.support.sink_process import catch_up
from tests.support.topic_reader import relayed, topic_of

PARENT_ID = "00f067aa0ba902b7"


def lines(log: str, trace_id: str) -> list[dict[str, Any]]:
    """Log lines of a trace, parsed."""
    return [json.loads(line) for line in log.splitlines() if trace_id in line]


def test_a_trace_id_leads_from_the_request_to_its_events(chain: Settings) -> None:
    sampled, unsampled, refused = (uuid.uuid4().hex for _ in range(3))
    with serving(chain) as process:
        made = move(chain, traceparent=f"00-{sampled}-{PARENT_ID}-01")
        move(chain, traceparent=f"00-{unsampled}-{PARENT_ID}-00")
        move(chain)
        move(chain, quantity=0, traceparent=f"00-{refused}-{PARENT_ID}-01")
        log = process.log_file.read_text()
    (answered,) = lines(log, sampled)
    assert (answered["event"], answered["status"]) == ("request completed", 201)
    assert (answered["path"], answered["trace_id"]) == ("/movements", sampled)
    assert [line["status"] for line in lines(log, refused)] == [422]
    assert lines(log, unsampled) == []
    records = relayed(chain)
    assert len(records) == 3
    of_trace = [record for record in records if sampled in (record.headers["traceparent"] or "")]
    assert [json.loads(record.value)["movement_id"] for record in of_trace] == [made.json()["id"]]


def test_the_batch_of_a_sink_links_to_the_appends_of_its_events(
    chain: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, sampled, unsampled = time.monotonic(), uuid.uuid4().hex, uuid.uuid4().hex
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with serving(chain):
            for trace_id, flags in ((sampled, "01"), (unsampled, "00"), (sampled, "01")):
                move(chain, traceparent=f"00-{trace_id}-{PARENT_ID}-{flags}").raise_for_status()
        records = relayed(chain)
        done = catch_up(chain)
        assert done.returncode == 0, done.stderr
        assert database.applied() == 3
        with socket.create_server(("127.0.0.1", 0)) as deaf:  # it takes connections, and never answers
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
            done = catch_up(chain, "naive")
        assert done.returncode == 0, done.stderr
        assert Database(chain, "naive").applied() == 3
        (batch,) = [span for span in collector.spans if span.kind == Proto.SPAN_KIND_CONSUMER]
        appends = [span for span in collector.spans if span.kind == Proto.SPAN_KIND_PRODUCER]
        requested = {span.id: span for span in collector.spans if span.kind == Proto.SPAN_KIND_SERVER}
    assert {span.trace_id for span in appends} == {sampled}
    assert [requested[span.parent].parent for span in appends] == [PARENT_ID] * 2
    assert sorted(link.place for link in batch.links) == sorted(span.place for span in appends)
    assert (batch.name, batch.parent, batch.failed) == (f"apply {topic_of(chain)}", "", False)
    assert batch.service == "stock-sinks"
    expected = {
        "messaging.system": "kafka",
        "messaging.operation.name": "apply",
        "messaging.operation.type": "process",
        "messaging.destination.name": topic_of(chain),
        "messaging.batch.message_count": 3,
        "outbox.sink": "dedup",
        "outbox.batch.applied": 3,
        "outbox.batch.dead": 0,
    }
    assert expected.items() <= batch.attributes.items()
    of_trace = [record.id for record in records if sampled in (record.headers["traceparent"] or "")]
    assert sorted(str(link.attributes["messaging.message.id"]) for link in batch.links) == sorted(of_trace)
    for link in batch.links:
        assert 0 < float(link.attributes["outbox.lag_ms"]) < 1000 * (time.monotonic() - began)
