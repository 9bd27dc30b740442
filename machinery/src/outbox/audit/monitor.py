"""Prometheus metrics that no process of the chain exports: slot, connector, dead letters, drift, losses.

| metric | what it is |
|---|---|
| `outbox_monitor_up` | by `part` (source, sink, connect): 1 if it answered this scrape; else its metrics are absent |
| `outbox_slot_active` | by `slot`: 1 while a client reads it |
| `outbox_slot_lag_bytes` | by `slot`: write-ahead log that the server retains for it |
| `outbox_slot_lost` | by `slot`: 1 once it is invalidated, or does not exist |
| `outbox_connector_running` | by `connector`: 1 while it and its task run; 0 if one has failed or was stopped |
| `outbox_connector_restarts_total` | by `connector`: how often the monitor has restarted its task |
| `outbox_dead_letters` | by `sink`: records set aside that nobody has replayed or discarded |
| `outbox_check_timestamp_seconds` | Unix time of the last check; absent before the first |
| `outbox_check_failed` | 1 if the last check could not be made; the metrics of the check before stay |
| `outbox_check_lost_events` | by `topic`: events of the outbox that the topic has skipped |
| `outbox_check_drift` | by `sink` and `comparison`: the sum of the absolute drifts |

Slot, connector and dead letters are queried at each scrape. The check is that of `outbox check --incremental`; it runs
beside the scrapes, again and again. Every few seconds the monitor looks at the connectors, and restarts a task that the
broker has forgotten (`outbox.relay.restarts`); it changes nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

import psycopg2
import requests
from confluent_kafka import KafkaException
from prometheus_client import CollectorRegistry, Counter, make_wsgi_app
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outbox.audit import check
from outbox.audit.report import Report
from outbox.base import scraped
from outbox.base.database import query
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.relay import connectors, lifecycle
from outbox.relay.restarts import Restarts

LOOK_S = 10.0  # between two looks at the connectors
SLOTS = """
SELECT slot_name, active, coalesce(pg_current_wal_lsn() - restart_lsn, 0)::float, wal_status IS NOT DISTINCT FROM 'lost'
  FROM pg_replication_slots WHERE slot_name = ANY (%s)
"""
DEAD_LETTERS = """
SELECT name, (SELECT count(*) FROM public.dead_letters WHERE dead_letters.sink = sinks.name AND status = 'open')
  FROM public.sinks
"""

Ask = Callable[[], list[Metric]]
Compare = Callable[[], Report]


class Monitor(Collector):
    """Collects the metrics. Any thread may scrape."""

    def __init__(self, parts: Mapping[str, Ask]) -> None:
        """``parts``: by part of the chain, what asks it for its metrics."""
        self._parts = parts
        self._checked: list[Metric] = []

    def collect(self) -> Iterator[Metric]:
        """The metrics of now, with those of the last check."""
        up = GaugeMetricFamily("outbox_monitor_up", "Whether the part answered for this scrape", labels=["part"])
        for part, ask in self._parts.items():
            try:
                found = ask()
            except (Failure, psycopg2.Error, requests.RequestException):
                found = []
            up.add_metric([part], bool(found))
            yield from found
        yield up
        yield from self._checked

    def check(self, compare: Compare) -> Failure | None:
        """Check, and keep what was found for the next scrapes. Returns the failure if the check could not be made."""
        failed = GaugeMetricFamily("outbox_check_failed", "Whether the last check could not be made")
        try:
            report = compare()
        except (Failure, psycopg2.Error, KafkaException) as error:
            failed.add_metric([], 1)
            self._checked = [failed, *(one for one in self._checked if one.name != failed.name)]
            return error if isinstance(error, Failure) else Failure(str(error).strip(), code="check-failed")
        failed.add_metric([], 0)
        self._checked = [failed, *_of_report(report)]
        return None


def of_project(settings: Settings) -> Monitor:
    """A monitor of the outbox's slot and connector, and of all sinks."""
    connector = connectors.load(settings)

    def slots() -> list[Metric]:
        rows = {name: values for name, *values in query(settings, SourceRole.AUDITOR, SLOTS, [[connector.name]])}
        is_active, lag_bytes, is_lost = rows.get(connector.name, (False, 0.0, True))
        return slot_metrics(connector.name, is_active=is_active, lag_bytes=lag_bytes, is_lost=is_lost)

    return Monitor(
        {
            "source": slots,
            "sink": lambda: dead_letter_metrics(dict(query(settings, SinkRole.AUDITOR, DEAD_LETTERS))),
            "connect": lambda: connector_metrics(connector.name, lifecycle.status(settings, connector).is_running),
        }
    )


def slot_metrics(slot: str, *, is_active: bool, lag_bytes: float, is_lost: bool) -> list[Metric]:
    """The metrics of a slot."""
    active = _gauge("outbox_slot_active", "Whether a client reads the slot", "slot")
    lag = _gauge("outbox_slot_lag_bytes", "Write-ahead log that is retained for the slot", "slot")
    lost = _gauge("outbox_slot_lost", "Whether the slot is invalidated or does not exist", "slot")
    active.add_metric([slot], is_active)
    lag.add_metric([slot], lag_bytes)
    lost.add_metric([slot], is_lost)
    return [active, lag, lost]


def connector_metrics(connector: str, is_running: bool) -> list[Metric]:
    """The metrics of a connector."""
    running = _gauge("outbox_connector_running", "Whether the connector and its task run", "connector")
    running.add_metric([connector], is_running)
    return [running]


def dead_letter_metrics(counts: Mapping[str, int]) -> list[Metric]:
    """The metrics of the sinks' dead letters."""
    letters = _gauge("outbox_dead_letters", "Records set aside and not resolved", "sink")
    for sink, count in counts.items():
        letters.add_metric([sink], count)
    return [letters]


def restart_counter(registry: CollectorRegistry) -> Counter:
    """Counts how often the monitor has restarted a connector's task, by connector."""
    return Counter("outbox_connector_restarts_total", "Restarts of its task", ["connector"], registry=registry)


def serve(settings: Settings, every_s: float, report: Callable[[str], None], ended: threading.Event) -> None:
    """Serve the metrics, and check every so many seconds, until ``ended``. Raises Failure if the port is taken."""
    monitor, registry = of_project(settings), CollectorRegistry()
    registry.register(monitor)
    restarted = restart_counter(registry)

    def count(connector: str, error: str) -> None:
        restarted.labels(connector).inc()
        report(f"connector {connector}: its task had failed and is restarted: {error}")

    restarts = Restarts(settings, count)
    host = settings.monitor_host
    app = make_wsgi_app(registry)
    with scraped.served(app, host, settings.monitor_port, "OUTBOX_MONITOR_PORT") as port:
        report(f"metrics on http://{host}:{port}/metrics")
        due_s = time.monotonic()
        while not ended.is_set():
            restarts.look(time.monotonic())
            if time.monotonic() >= due_s:
                failure = monitor.check(lambda: check.check(settings, incremental=True))
                if failure is not None:
                    report(f"no check: {failure.message}")
                due_s = time.monotonic() + every_s
            ended.wait(max(0, min(LOOK_S, due_s - time.monotonic())))


def _of_report(report: Report) -> Iterator[Metric]:
    yield GaugeMetricFamily("outbox_check_timestamp_seconds", "When the last check was made", time.time())
    lost = _gauge("outbox_check_lost_events", "Events of the outbox that the topic has skipped", "topic")
    for topic in report.topics:
        lost.add_metric([topic.name], len(topic.lost))
    drift = _gauge("outbox_check_drift", "Sum of the absolute drifts", "sink", "comparison")
    for sink in report.sinks:
        for comparison in sink.comparisons:
            drift.add_metric([sink.name, comparison.name], float(comparison.drift_total))
    yield from (lost, drift)


def _gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, documentation, labels=labels)
