"""Prometheus metrics that no process of the chain exports: slot, connector, dead letters, drift, losses.

`METRICS` describes each metric. Slot, connector and dead letters are queried at each scrape. The check is that of
`outbox check --incremental`; it runs beside the scrapes, again and again. Every few seconds the monitor looks at the
connectors, and restarts a task that the broker has forgotten; it changes nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import psycopg2
import requests
from confluent_kafka import KafkaException
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outbox.audit import check
from outbox.audit.report import Report
from outbox.base import scraped
from outbox.base.database import query, reason_of
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.relay import connectors, lifecycle
from outbox.relay.rest import Rest

LOOK_S = 10.0  # between two looks at the connectors
FORGOTTEN = "InvalidPidMappingException"
SLOT = """
SELECT active, coalesce(pg_current_wal_lsn() - restart_lsn, 0)::float, wal_status IS NOT DISTINCT FROM 'lost'
  FROM pg_replication_slots WHERE slot_name = %s
"""
DEAD_LETTERS = """
SELECT name, (SELECT count(*) FROM public.dead_letters WHERE dead_letters.sink = sinks.name AND status = 'open')
  FROM public.sinks
"""

# By metric, what it says, and its labels.
METRICS: dict[str, tuple[str, Sequence[str]]] = {
    "outbox_monitor_up": ("1 if the part (source, sink, connect) answered now; else it has no metrics", ["part"]),
    "outbox_slot_active": ("1 while a client reads the slot", ["slot"]),
    "outbox_slot_lag_bytes": ("Write-ahead log that the server retains for the slot", ["slot"]),
    "outbox_slot_lost": ("1 once the slot is invalidated, or does not exist", ["slot"]),
    "outbox_connector_running": ("1 while the connector and its task run, and none was stopped", ["connector"]),
    "outbox_connector_restarts_total": ("How often the monitor has restarted the connector's task", ["connector"]),
    "outbox_dead_letters": ("Records set aside that nobody has replayed or discarded", ["sink"]),
    "outbox_check_timestamp_seconds": ("Unix time of the last check; absent before the first", []),
    "outbox_check_failed": (
        "1 if the last check could not be made (metrics of the one before stay), or read a target",
        [],
    ),
    "outbox_check_lost_events": ("Events of the outbox that the topic has skipped", ["topic"]),
    "outbox_check_drift": ("Sum of the absolute drifts; of rows, how many keys differ", ["sink", "comparison"]),
}

Samples = list[tuple[str, float, Sequence[str]]]  # a metric, its value, and those of its labels
Ask = Callable[[], Samples]
Compare = Callable[[], Report]


class Monitor(Collector):
    """Collects the metrics. Any thread may scrape."""

    def __init__(self, parts: Mapping[str, Ask]) -> None:
        """``parts``: by part of the chain, what asks it for its metrics."""
        self._parts = parts
        self._checked: Samples = []
        self.restarts: dict[str, int] = {}  # by connector

    def collect(self) -> Iterator[Metric]:
        """The metrics of now, with those of the last check."""
        samples: Samples = [("outbox_connector_restarts_total", times, [name]) for name, times in self.restarts.items()]
        for part, ask in self._parts.items():
            try:
                samples += [*ask(), ("outbox_monitor_up", 1, [part])]
            except (Failure, psycopg2.Error, requests.RequestException):
                samples.append(("outbox_monitor_up", 0, [part]))
        families = dict[str, GaugeMetricFamily]()
        for name, value, labels in [*samples, *self._checked]:
            documentation, names = METRICS[name]
            family = families.setdefault(name, GaugeMetricFamily(name, documentation, labels=names))
            family.add_metric(labels, value)
        yield from families.values()

    def check(self, compare: Compare) -> Failure | None:
        """Check, and keep what was found for the next scrapes. Returns the failure if the check could not be made, or
        could not read a target.
        """
        try:
            report = compare()
        except (Failure, psycopg2.Error, KafkaException) as error:
            kept = [one for one in self._checked if one[0] != "outbox_check_failed"]
            self._checked = [("outbox_check_failed", 1, []), *kept]
            return error if isinstance(error, Failure) else Failure(reason_of(error), code="check-failed")
        unread = [Failure(one.message, code=one.code) for one in report.findings if one.code == "target-unreadable"]
        self._checked = [
            ("outbox_check_failed", bool(unread), []),
            ("outbox_check_timestamp_seconds", time.time(), []),
            *(("outbox_check_lost_events", len(topic.lost), [topic.name]) for topic in report.topics),
            *(
                ("outbox_check_drift", one.differences.count or float(one.drift_total), [sink.name, one.name])
                for sink in report.sinks
                for one in sink.comparisons
            ),
        ]
        return next(iter(unread), None)


def restart_forgotten(rests: Mapping[str, Rest], on_restart: Callable[[str, str], None]) -> None:
    """Restart the tasks that the broker has forgotten, of these connectors. ``on_restart`` is called with the name of
    each, and the error of its task.

    A broker forgets a transactional id that nobody has used for a week (`transactional.id.expiration.ms`), also that of
    a running task that has had nothing to relay. The task's next transaction fails then, and Connect restarts no failed
    task. Nothing is lost: a restarted task registers its id again, and continues at its stored offset.

    No other failure is restarted. Debezium would make a missing slot again without its events, so `connect apply` looks
    at the slot first. A slot that a task reads until it fails in this way cannot have been dropped. A Connect that does
    not answer is asked again at the next look.
    """
    for name, rest in rests.items():
        with suppress(Failure):
            error = rest.state().error
            if error is not None and FORGOTTEN in error:
                rest.restart_task()
                on_restart(name, error)


def of_project(settings: Settings) -> Monitor:
    """A monitor of the outbox's slot and connector, and of all sinks."""
    connector = connectors.load(settings)
    name = connector.name

    def slot() -> Samples:
        rows = query(settings, SourceRole.AUDITOR, SLOT, [name])
        is_active, lag_bytes, is_lost = rows[0] if rows else (False, 0.0, True)
        return [
            ("outbox_slot_active", is_active, [name]),
            ("outbox_slot_lag_bytes", lag_bytes, [name]),
            ("outbox_slot_lost", is_lost, [name]),
        ]

    def connect() -> Samples:
        return [("outbox_connector_running", lifecycle.status(settings, connector).is_running, [name])]

    def sink() -> Samples:
        return [
            ("outbox_dead_letters", count, [sink]) for sink, count in query(settings, SinkRole.AUDITOR, DEAD_LETTERS)
        ]

    return Monitor({"source": slot, "sink": sink, "connect": connect})


def serve(
    settings: Settings, at: tuple[str, int], every_s: float, report: Callable[[str], None], ended: threading.Event
) -> None:
    """Serve the metrics at a host and port, and check every so many seconds, until ``ended``.

    Raises Failure if the port is taken.
    """
    monitor, registry = of_project(settings), CollectorRegistry()
    registry.register(monitor)
    rests = {one.name: Rest(settings, one) for one in connectors.every(settings)}
    monitor.restarts = dict.fromkeys(rests, 0)

    def count(connector: str, error: str) -> None:
        monitor.restarts[connector] += 1
        report(f"connector {connector}: its task had failed and is restarted: {error}")

    with scraped.served(make_wsgi_app(registry), at, "--bind") as port:
        report(f"metrics on http://{at[0]}:{port}/metrics")
        due_s = time.monotonic()
        while not ended.is_set():
            restart_forgotten(rests, count)
            if time.monotonic() >= due_s:
                failure = monitor.check(lambda: check.check(settings, incremental=True))
                if failure is not None:
                    report(f"no check: {failure.message}")
                due_s = time.monotonic() + every_s
            ended.wait(max(0, min(LOOK_S, due_s - time.monotonic())))
