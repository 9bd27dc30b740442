"""Metrics of the sinks, with and without a Kafka that answers."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
import requests
from prometheus_client import generate_latest

from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.sink.remembering.positions import TopicOffsets
from outbox.sink.running.metrics import Lag, Metrics, State, ask_lag, served
from outbox.sink.writer import Counts
from outbox_lab.stack import ports

COUNTS = Counts(rows=10, applied=6, duplicates=3, rejected=1, dead=1, skipped=4)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings whose Kafka is away and whose metrics are served on a free port."""
    kafka, port = ports.choose(0, 0)
    return load(tmp_path, environment=False, kafka_bootstrap=f"127.0.0.1:{kafka}", sink_metrics=f"127.0.0.1:{port}")


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


class TestCounts:
    def test_all_is_there_as_zero_once_a_sink_has_started(self) -> None:
        metrics = Metrics()
        metrics.started("a", {"t": {0: 5}})
        for name in ("rows", "duplicates", "skipped", "filtered", "dead_letters"):
            assert value(metrics, f"outbox_sink_{name}_total", sink="a") == 0
        for stage in ("read", "apply"):
            assert value(metrics, "outbox_sink_batch_duration_seconds_count", sink="a", stage=stage) == 0

    def test_batches_add_up_by_sink(self) -> None:
        metrics = Metrics()
        for sink in ("a", "b"):
            metrics.started(sink, {"t": {0: 0}})
        metrics.applied("a", COUNTS, {"t": {0: 12}}, read_s=0.25, apply_s=0.5)
        metrics.applied("a", COUNTS, {"t": {0: 24}}, read_s=0.25, apply_s=0.5)
        assert value(metrics, "outbox_sink_rows_total", sink="a") == 20
        assert value(metrics, "outbox_sink_duplicates_total", sink="a") == 6
        assert value(metrics, "outbox_sink_dead_letters_total", sink="a") == 4
        assert value(metrics, "outbox_sink_skipped_total", sink="a") == 8
        assert value(metrics, "outbox_sink_batch_duration_seconds_count", sink="a", stage="read") == 2
        assert value(metrics, "outbox_sink_batch_duration_seconds_sum", sink="a", stage="read") == 0.5
        assert value(metrics, "outbox_sink_batch_duration_seconds_sum", sink="a", stage="apply") == 1.0
        assert value(metrics, "outbox_sink_rows_total", sink="b") == 0

    def test_progress_is_the_time_of_the_start_and_then_of_the_last_batch(self) -> None:
        metrics, name = Metrics(), "outbox_sink_last_progress_timestamp_seconds"
        before = time.time()
        metrics.started("a", {"t": {0: 0}})
        started = value(metrics, name, sink="a")
        metrics.applied("a", COUNTS, {"t": {0: 12}}, read_s=0.1, apply_s=0.1)
        applied = value(metrics, name, sink="a")
        assert started is not None
        assert applied is not None
        assert before <= started < applied <= time.time()


class TestLag:
    def test_is_asked_for_at_each_scrape_with_the_offsets_of_then(self) -> None:
        asked: list[Mapping[str, TopicOffsets]] = []

        def ask(next_offsets: Mapping[str, TopicOffsets]) -> Mapping[str, Lag]:
            asked.append(next_offsets)
            return {"a": Lag({"t": {0: 30, 1: 12}, "u": {0: 1}}, age_s=1.5)}

        metrics = Metrics()
        metrics.collect_lag(ask)
        metrics.started("a", {"t": {0: 5, 1: 0}, "u": {0: 1}})
        assert asked == []
        assert value(metrics, "outbox_sink_lag_events", sink="a") == 43
        metrics.applied("a", COUNTS, {"t": {0: 7, 1: 9}, "u": {0: 1}}, read_s=0.1, apply_s=0.1)
        assert value(metrics, "outbox_sink_partition_lag_events", sink="a", topic="t", partition="1") == 12
        assert value(metrics, "outbox_sink_lag_seconds", sink="a") == 1.5
        assert value(metrics, "outbox_sink_kafka_up") == 1
        assert [offsets["a"]["t"] for offsets in asked[:2]] == [{0: 5, 1: 0}, {0: 7, 1: 9}]

    def test_is_left_out_when_it_is_not_known(self) -> None:
        metrics = Metrics()
        metrics.collect_lag(lambda _: None)
        metrics.started("a", {"t": {0: 0}})
        assert value(metrics, "outbox_sink_kafka_up") == 0
        assert value(metrics, "outbox_sink_lag_events", sink="a") is None
        assert value(metrics, "outbox_sink_lag_seconds", sink="a") is None

    def test_a_kafka_that_is_away_is_given_up_in_time(self, settings: Settings) -> None:
        began = time.monotonic()
        assert ask_lag(settings, {"a": {"t": {0: 0}}}, timeout_s=0.2) is None
        assert time.monotonic() - began < 5


class TestServed:
    def test_over_http_within_the_block_even_without_kafka(self, settings: Settings) -> None:
        url = f"http://{settings.sink_metrics}/metrics"
        metrics = Metrics()
        metrics.started("a", {"t": {0: 0}})
        with served(settings, metrics):
            told = urllib.request.urlopen(url, timeout=30).read().decode()
        assert 'outbox_sink_rows_total{sink="a"} 0.0' in told
        assert "outbox_sink_kafka_up 0.0" in told
        # Closed: the port can be had again.
        with served(settings, Metrics()):
            pass

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

    def test_health_is_red_until_every_sink_runs(self, settings: Settings) -> None:
        url = f"http://{settings.sink_metrics}/healthz"
        metrics = Metrics()
        for sink in ("a", "b"):
            metrics.now(sink, State.STARTING)
        with served(settings, metrics):
            assert requests.get(url, timeout=30).status_code == 503
            for sink in ("a", "b"):
                metrics.now(sink, State.RUNNING)
            assert requests.get(url, timeout=30).status_code == 200
            metrics.now("b", State.FAILED, "events-lost")
            answer = requests.get(url, timeout=30)
        assert answer.status_code == 503
        assert answer.json()["sinks"] == {
            "a": {"state": "running", "failure": None},
            "b": {"state": "failed", "failure": "events-lost"},
        }
        assert [value(metrics, "outbox_sink_up", sink=sink) for sink in ("a", "b")] == [1, 0]

    def test_not_at_all_by_default(self) -> None:
        metrics = Metrics()
        with served(Settings(), metrics):
            assert b"kafka" not in generate_latest(metrics.registry)

    def test_a_port_that_is_taken_is_one_clear_line(self, settings: Settings) -> None:
        with (
            served(settings, Metrics()),
            pytest.raises(Failure, match=rf"{settings.sink_metrics}: .*OUTBOX_SINK_METRICS"),
            served(settings, Metrics()),
        ):
            pytest.fail("two on one port")
