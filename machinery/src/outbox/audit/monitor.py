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
broker has forgotten; it changes nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import psycopg2
import requests
from confluent_kafka import KafkaException
from prometheus_client import CollectorRegistry, Counter, make_wsgi_app
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
RESTARTS_MAX = 3
WITHIN_S = 3600.0
SLOT = """
SELECT active, coalesce(pg_current_wal_lsn() - restart_lsn, 0)::float, wal_status IS NOT DISTINCT FROM 'lost'
  FROM pg_replication_slots WHERE slot_name = %s
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
        up = dict[str, float]()
        for part, ask in self._parts.items():
            try:
                found = ask()
            except (Failure, psycopg2.Error, requests.RequestException):
                found = []
            up[part] = bool(found)
            yield from found
        yield _gauge("outbox_monitor_up", "Whether the part answered for this scrape", up, "part")
        yield from self._checked

    def check(self, compare: Compare) -> Failure | None:
        """Check, and keep what was found for the next scrapes. Returns the failure if the check could not be made."""
        failed = GaugeMetricFamily("outbox_check_failed", "Whether the last check could not be made")
        try:
            report = compare()
        except (Failure, psycopg2.Error, KafkaException) as error:
            failed.add_metric([], 1)
            self._checked = [failed, *(one for one in self._checked if one.name != failed.name)]
            return error if isinstance(error, Failure) else Failure(reason_of(error), code="check-failed")
        failed.add_metric([], 0)
        self._checked = [failed, *_of_report(report)]
        return None


class Restarts:
    """Restarts the tasks that the broker has forgotten, of all connectors. Not for several threads at once.

    A broker forgets a transactional id that nobody has used for a week (`transactional.id.expiration.ms`), also that of
    a running task that has had nothing to relay. The task's next transaction fails then, and Connect restarts no failed
    task. Nothing is lost: a restarted task registers its id again, and continues at its stored offset.

    No other failure is restarted. Debezium would make a missing slot again without its events, so `connect apply` looks
    at the slot first. A slot that a task reads until it fails in this way cannot have been dropped.
    """

    def __init__(self, settings: Settings, on_restart: Callable[[str, str], None]) -> None:
        """``on_restart`` is called with the name of each connector that was restarted, and the error of its task."""
        self._on_restart = on_restart
        self._rests = {one.name: Rest(settings, one) for one in connectors.every(settings)}
        self._restarted_at = defaultdict[str, deque[float]](lambda: deque(maxlen=RESTARTS_MAX))

    def look(self, now_s: float) -> None:
        """Restart what has failed in this way, each connector `RESTARTS_MAX` times within `WITHIN_S` at most.

        ``now_s`` is of the monotonic clock. A Connect that does not answer is asked again at the next look.
        """
        for name, rest in self._rests.items():
            with suppress(Failure):
                error = rest.state().error
                if error is not None and FORGOTTEN in error and self.allows(name, now_s):
                    rest.restart_task()
                    self.count(name, now_s)
                    self._on_restart(name, error)

    def allows(self, name: str, now_s: float) -> bool:
        """Whether a connector may be restarted once more."""
        return sum(now_s - at_s <= WITHIN_S for at_s in self._restarted_at[name]) < RESTARTS_MAX

    def count(self, name: str, now_s: float) -> None:
        """Count a restart."""
        self._restarted_at[name].append(now_s)


def of_project(settings: Settings) -> Monitor:
    """A monitor of the outbox's slot and connector, and of all sinks."""
    connector = connectors.load(settings)
    name = connector.name

    def slot() -> list[Metric]:
        rows = query(settings, SourceRole.AUDITOR, SLOT, [name])
        is_active, lag_bytes, is_lost = rows[0] if rows else (False, 0.0, True)
        return slot_metrics(name, is_active=is_active, lag_bytes=lag_bytes, is_lost=is_lost)

    return Monitor(
        {
            "source": slot,
            "sink": lambda: dead_letter_metrics(dict(query(settings, SinkRole.AUDITOR, DEAD_LETTERS))),
            "connect": lambda: connector_metrics(name, lifecycle.status(settings, connector).is_running),
        }
    )


def slot_metrics(slot: str, *, is_active: bool, lag_bytes: float, is_lost: bool) -> list[Metric]:
    """The metrics of a slot."""
    return [
        _gauge("outbox_slot_active", "Whether a client reads the slot", {slot: is_active}, "slot"),
        _gauge("outbox_slot_lag_bytes", "Write-ahead log that is retained for the slot", {slot: lag_bytes}, "slot"),
        _gauge("outbox_slot_lost", "Whether the slot is invalidated or does not exist", {slot: is_lost}, "slot"),
    ]


def connector_metrics(connector: str, is_running: bool) -> list[Metric]:
    """The metrics of a connector."""
    documentation = "Whether the connector and its task run"
    return [_gauge("outbox_connector_running", documentation, {connector: is_running}, "connector")]


def dead_letter_metrics(counts: Mapping[str, int]) -> list[Metric]:
    """The metrics of the sinks' dead letters."""
    return [_gauge("outbox_dead_letters", "Records set aside and not resolved", counts, "sink")]


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
    lost = {topic.name: len(topic.lost) for topic in report.topics}
    yield _gauge("outbox_check_lost_events", "Events of the outbox that the topic has skipped", lost, "topic")
    drift: dict[tuple[str, ...], float] = {
        (sink.name, one.name): float(one.drift_total) if one.rows is None else one.differences.count
        for sink in report.sinks
        for one in sink.comparisons
    }
    text = "Sum of the absolute drifts; of rows, how many keys differ"
    yield _gauge("outbox_check_drift", text, drift, "sink", "comparison")


def _gauge(
    name: str, documentation: str, values: Mapping[str, float] | Mapping[tuple[str, ...], float], *labels: str
) -> GaugeMetricFamily:
    """A metric with its values by label, or by several labels."""
    family = GaugeMetricFamily(name, documentation, labels=labels)
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family
