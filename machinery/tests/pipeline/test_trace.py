"""A trace leads from a request to its events on the topic, and to the batches of sinks that apply them."""

from __future__ import annotations

import json
import socket
import time
import uuid

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Proto

from outbox.base.settings import Settings
from tests.stock import move, serving
from tests.support.collector import collecting
from tests.support.sink_driver import Database
from tests.support.sink_process import catch_up
from tests.support.topic_reader import relayed, topic_of

PARENT_ID = "00f067aa0ba902b7"


def test_the_batch_of_a_sink_links_to_the_appends_of_its_events(
    chain: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, sampled, unsampled = time.monotonic(), uuid.uuid4().hex, uuid.uuid4().hex
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with serving(chain) as process:
            for trace_id, flags in ((sampled, "01"), (unsampled, "00"), (sampled, "01")):
                move(chain, traceparent=f"00-{trace_id}-{PARENT_ID}-{flags}").raise_for_status()
            log = process.log_file.read_text().splitlines()
        logged = [json.loads(line) for line in log if sampled in line]
        assert [(one["event"], one["trace_id"], one["status"]) for one in logged] == [
            ("request completed", sampled, 201)
        ] * 2
        assert [line for line in log if unsampled in line] == []
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
