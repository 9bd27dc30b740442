"""Metrics of the sinks, with and without a Kafka that answers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import requests
from prometheus_client import generate_latest

from outbox.base.settings import Settings, load
from outbox.sink.remembering.positions import TopicOffsets
from outbox.sink.running.metrics import Lag, Metrics, State, ask_lag, served
from outbox.sink.writer import Counts
from outbox_lab.stack import ports
from outbox_lab.testing.failures import raises

COUNTS = Counts(rows=10, applied=6, duplicates=3, rejected=1, dead=1, skipped=4)
ONCE = {"rows": 10, "duplicates": 3, "skipped": 4, "filtered": 0, "dead_letters": 2}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings whose Kafka is away and whose metrics are served on a free port."""
    kafka, port = ports.choose(0, 0)
    return load(tmp_path, environment=False, kafka_bootstrap=f"127.0.0.1:{kafka}", sink_metrics=f"127.0.0.1:{port}")


@pytest.fixture
def metrics() -> Metrics:
    """Those of two sinks that have started."""
    made = Metrics()
    for sink in ("a", "b"):
        made.started(sink, {"t": {0: 5, 1: 0}, "u": {0: 1}})
    return made


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"outbox_sink_{name}", labels)


def test_batches_add_up_by_sink_from_zero_on(metrics: Metrics) -> None:
    started_at = value(metrics, "last_progress_timestamp_seconds", sink="a")
    for times in range(3):
        for name, count in ONCE.items():
            assert value(metrics, f"{name}_total", sink="a") == times * count
            assert value(metrics, f"{name}_total", sink="b") == 0
        for stage, seconds in (("read", 0.25), ("apply", 0.5)):
            duration = {"sink": "a", "stage": stage}
            assert value(metrics, "batch_duration_seconds_count", **duration) == times
            assert value(metrics, "batch_duration_seconds_sum", **duration) == times * seconds
        metrics.applied("a", COUNTS, {"t": {0: 12 + times}}, read_s=0.25, apply_s=0.5)
    applied_at = value(metrics, "last_progress_timestamp_seconds", sink="a")
    assert started_at is not None
    assert applied_at is not None
    assert started_at < applied_at <= time.time()


class TestLag:
    def test_is_asked_for_at_each_scrape_with_the_offsets_of_then(self, metrics: Metrics) -> None:
        asked: list[Mapping[str, TopicOffsets]] = []

        def ask(next_offsets: Mapping[str, TopicOffsets]) -> Mapping[str, Lag]:
            asked.append(next_offsets)
            return {"a": Lag({"t": {0: 30, 1: 12}, "u": {0: 1}}, age_s=1.5)}

        metrics.collect_lag(ask)
        assert asked == []
        assert value(metrics, "lag_events", sink="a") == 43
        metrics.applied("a", COUNTS, {"t": {0: 7, 1: 9}, "u": {0: 1}}, read_s=0.1, apply_s=0.1)
        assert value(metrics, "partition_lag_events", sink="a", topic="t", partition="1") == 12
        assert value(metrics, "lag_seconds", sink="a") == 1.5
        assert value(metrics, "kafka_up") == 1
        assert [offsets["a"]["t"] for offsets in asked[:2]] == [{0: 5, 1: 0}, {0: 7, 1: 9}]

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
        assert [value(metrics, "up", sink=sink) for sink in ("a", "b")] == [1, 0]

    def test_not_at_all_by_default(self, metrics: Metrics) -> None:
        with served(Settings(), metrics):
            assert b"kafka" not in generate_latest(metrics.registry)
