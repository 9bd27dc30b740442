"""`outbox monitor`: its metrics are documented, and it shows which part does not answer."""

from __future__ import annotations

import queue
import threading
from decimal import Decimal
from pathlib import Path

import psycopg2
import pytest
import requests
from confluent_kafka import KafkaError, KafkaException
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from outbox.audit import monitor
from outbox.audit.monitor import Monitor
from outbox.audit.report import ComparisonReport, Report, SinkReport, TopicReport
from outbox.base.errors import Failure
from outbox.base.settings import DatabaseUrl, Settings, load
from outbox_lab.stack import ports
from outbox_lab.testing.failures import raises

REPORT = Report(
    topics=[TopicReport("t", lost=["a", "b"])],
    sinks=[SinkReport("s", comparisons=[ComparisonReport("c", drift={"k": Decimal(-3), "l": Decimal(4)})])],
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of servers of which none answers."""
    [port] = ports.choose(0)
    url = DatabaseUrl(port=port)
    return load(tmp_path, environment=False).replace(
        source_db_url=url, sink_db_url=url, connect_url=f"http://127.0.0.1:{port}"
    )


def samples(collector: Monitor) -> dict[tuple[str, ...], float]:
    """By name and values of labels, in the order of their names."""
    registry = CollectorRegistry()
    registry.register(collector)
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_a_part_that_does_not_answer_has_no_metrics_and_is_down(settings: Settings) -> None:
    assert samples(monitor.of_project(settings)) == {
        ("outbox_monitor_up", part): 0.0 for part in ("source", "sink", "connect")
    }


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Failure("Kafka is unavailable", code="kafka-unavailable"), "kafka-unavailable"),
        (psycopg2.OperationalError("the server has closed the connection"), "check-failed"),
        (KafkaException(KafkaError(KafkaError._TRANSPORT)), "check-failed"),
    ],
    ids=["failure", "database", "kafka"],
)
def test_the_result_of_a_check_stays_until_the_next_that_does_not_fail(
    settings: Settings, error: Exception, code: str
) -> None:
    collector = monitor.of_project(settings)
    assert collector.check(lambda: REPORT) is None
    found = samples(collector)
    assert (found["outbox_check_drift", "c", "s"], found["outbox_check_lost_events", "t"]) == (7, 2)
    assert found["outbox_check_failed",] == 0
    assert found["outbox_check_timestamp_seconds",] > 0

    def fails() -> Report:
        raise error

    failure = collector.check(fails)
    assert failure is not None
    assert failure.code == code
    assert samples(collector) == found | {("outbox_check_failed",): 1}


def test_a_web_page_whose_name_leads_to_the_monitor_reads_nothing(settings: Settings) -> None:
    [port] = ports.choose(0)
    ended, said = threading.Event(), queue.SimpleQueue[str]()
    serving = threading.Thread(target=monitor.serve, args=(settings, ("127.0.0.1", port), 3600, said.put, ended))
    serving.start()
    try:
        url = said.get(timeout=60).partition(" on ")[2]
        answer = requests.get(url, headers={"Host": f"evil.example:{port}"}, timeout=60)
        with raises("port-taken"):  # by this one
            monitor.serve(settings, ("127.0.0.1", port), 1, lambda _: None, ended)
    finally:
        ended.set()
        serving.join()
    assert (answer.status_code, "outbox" in answer.text) == (421, False)
