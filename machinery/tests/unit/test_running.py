"""Sinks that run: their metrics, with and without a Kafka that answers, and the failures that they survive. And the
metrics of `outbox monitor`.
"""

from __future__ import annotations

import queue
import threading
import time
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
from outbox.sink.running.metrics import Metrics, State, ask_lag, served
from outbox.sink.running.supervisor import FAILURES_MAX, MAX_DELAY_S, WITHIN_S, Retries
from outbox_lab.stack import ports
from outbox_lab.testing.failures import raises


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a Kafka that is not running, and of a free port for the metrics."""
    kafka, port = ports.choose(0, 0)
    return load(tmp_path, environment=False, kafka_bootstrap=f"127.0.0.1:{kafka}", sink_metrics=f"127.0.0.1:{port}")


@pytest.fixture
def metrics() -> Metrics:
    """Those of two sinks that have started."""
    made = Metrics()
    for sink in ("a", "b"):
        made.started(sink, {"t": {0: 5, 1: 0}, "u": {0: 1}})
    return made


class TestLag:
    def test_a_kafka_that_is_away_is_given_up_in_time(self, settings: Settings) -> None:
        began = time.monotonic()
        assert ask_lag(settings, {"a": {"t": {0: 0}}}, timeout_s=0.2) is None
        assert time.monotonic() - began < 5


class TestServed:
    def test_over_http_within_the_block_even_without_kafka(self, settings: Settings, metrics: Metrics) -> None:
        with served(settings, metrics):
            told = requests.get(f"http://{settings.sink_metrics}/metrics", timeout=30).text
            with raises("port-taken", str(settings.sink_metrics), "OUTBOX_SINK_METRICS"), served(settings, Metrics()):
                pytest.fail("two on one port")
        assert 'outbox_sink_rows_total{sink="a"} 0.0' in told
        assert "outbox_sink_kafka_up 0.0" in told
        assert "outbox_sink_lag_events{" not in told, "it is left out when it is not known"
        with served(settings, Metrics()):
            pass  # closed: the port can be had again

    def test_a_web_page_whose_name_leads_here_reads_nothing(self, settings: Settings) -> None:
        url = f"http://{settings.sink_metrics}"
        port = url.rpartition(":")[2]
        with served(settings, Metrics()):
            for path in ("/metrics", "/healthz"):
                for host in ("evil.example", f"127.0.0.1.evil.example:{port}", f"evil.example.:{port}", "[::1"):
                    answer = requests.get(url + path, headers={"Host": host}, timeout=30)
                    assert (answer.status_code, "outbox" in answer.text) == (421, False), (path, host)
            for host in (f"localhost:{port}", f"sink:{port}", f"[::1]:{port}", "10.0.0.1"):
                assert requests.get(f"{url}/healthz", headers={"Host": host}, timeout=30).status_code == 200

    def test_health_is_red_until_every_sink_runs(self, settings: Settings, metrics: Metrics) -> None:
        answers = []
        with served(settings, metrics):
            for of_b, failure in ((State.STARTING, None), (State.RUNNING, None), (State.FAILED, "events-lost")):
                metrics.now("a", State.RUNNING)
                metrics.now("b", of_b, failure)
                answers.append(requests.get(f"http://{settings.sink_metrics}/healthz", timeout=30))
        assert [answer.status_code for answer in answers] == [503, 200, 503]
        assert answers[-1].json()["sinks"] == {
            "a": {"state": "running", "failure": None},
            "b": {"state": "failed", "failure": "events-lost"},
        }
        assert [metrics.registry.get_sample_value("outbox_sink_up", {"sink": sink}) for sink in "ab"] == [1, 0]


# Which failures a sink survives by itself, and for how long it tries --------------------------------------------------


def test_the_delay_doubles_up_to_its_bound_and_then_the_sink_gives_up() -> None:
    retries = Retries()
    delays = [retries.delay_s("database-busy", float(number)) for number in range(FAILURES_MAX)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *[MAX_DELAY_S] * (FAILURES_MAX - 7), None]
    assert retries.are_exhausted


def test_failures_before_a_success_and_of_long_ago_do_not_count() -> None:
    retries = Retries()
    for _ in range(3 * FAILURES_MAX):
        assert retries.delay_s("topic-silent", 0.0) == 1.0
        retries.succeeded()
    for number in range(3 * FAILURES_MAX):
        assert retries.delay_s("database-unavailable", number * (WITHIN_S + 1)) == 1.0


@pytest.mark.parametrize(
    ("code", "delay_s", "is_exhausted"),
    [
        ("topic-missing", 1.0, False),
        ("token-server-unavailable", 1.0, False),
        *((code, None, False) for code in ("checkpoint-unusable", "events-lost", "kafka-login-refused")),
        *((code, None, False) for code in ("sink-fenced", "sink-has-driver", "unexpected")),
        ("event-loop-blocked", None, True),  # passes in another process alone
    ],
)
def test_only_what_may_pass_is_tried_again(code: str, delay_s: float | None, is_exhausted: bool) -> None:
    retries = Retries()
    assert retries.delay_s(code, 0.0) == delay_s
    assert retries.are_exhausted is is_exhausted


# `outbox monitor` -----------------------------------------------------------------------------------------------------


REPORT = Report(
    topics=[TopicReport("t", lost=["a", "b"])],
    sinks=[SinkReport("s", comparisons=[ComparisonReport("c", drift={"k": Decimal(-3), "l": Decimal(4)})])],
)


@pytest.fixture
def unreachable(tmp_path: Path) -> Settings:
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


def test_a_part_that_does_not_answer_has_no_metrics_and_is_down(unreachable: Settings) -> None:
    assert samples(monitor.of_project(unreachable)) == {
        ("outbox_monitor_up", part): 0.0 for part in ("source", "sink", "connect")
    }


def test_the_result_of_a_check_stays_until_the_next_that_does_not_fail(unreachable: Settings) -> None:
    collector = monitor.of_project(unreachable)
    assert collector.check(lambda: REPORT) is None
    found = samples(collector)
    assert (found["outbox_check_drift", "c", "s"], found["outbox_check_lost_events", "t"]) == (7, 2)
    assert found["outbox_check_failed",] == 0
    unled = KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))
    for error in (Failure("unavailable"), psycopg2.OperationalError(), unled):

        def fails(error: Exception = error) -> Report:
            raise error

        failure = collector.check(fails)
        assert failure is not None
        assert failure.code == ("failed" if isinstance(error, Failure) else "check-failed")
        assert samples(collector) == found | {("outbox_check_failed",): 1}


def test_a_web_page_whose_name_leads_to_the_monitor_reads_nothing(unreachable: Settings) -> None:
    [port] = ports.choose(0)
    ended, said = threading.Event(), queue.SimpleQueue[str]()
    serving = threading.Thread(target=monitor.serve, args=(unreachable, ("127.0.0.1", port), 3600, said.put, ended))
    serving.start()
    try:
        url = said.get(timeout=60).partition(" on ")[2]
        answer = requests.get(url, headers={"Host": f"evil.example:{port}"}, timeout=60)
        with raises("port-taken"):  # by this one
            monitor.serve(unreachable, ("127.0.0.1", port), 1, lambda _: None, ended)
    finally:
        ended.set()
        serving.join()
    assert (answer.status_code, "outbox" in answer.text) == (421, False)
