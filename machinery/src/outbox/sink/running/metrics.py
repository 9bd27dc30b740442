"""Prometheus metrics of the sinks of one process, and the port that they are scraped from.

| metric | per sink, since its process started |
|---|---|
| `outbox_sink_up` | 1 while its query runs; 0 while it starts, fails or has failed |
| `outbox_sink_rows_total` | valid events read: applied, duplicate, refused or filtered |
| `outbox_sink_duplicates_total` | events that the strategy knew and skipped |
| `outbox_sink_skipped_total` | events on its topics that it has not asked for; it passes them |
| `outbox_sink_filtered_total` | new events that its transform leaves out |
| `outbox_sink_dead_letters_total` | records set aside, invalid or refused; a repetition counts again |
| `outbox_sink_batch_duration_seconds` | by `stage`: `read` (with decoding) or `apply`; of a large batch by part |
| `outbox_sink_last_progress_timestamp_seconds` | Unix time of the last applied batch; before it, of the first start |
| `outbox_sink_lag_events` | upper bound of events not applied: markers, aborted and skipped records count too |
| `outbox_sink_partition_lag_events` | the same by `topic` and `partition` |
| `outbox_sink_lag_seconds` | age of the oldest record that is not applied; 0 when all are applied |
| `outbox_sink_kafka_up` | 1 if Kafka answered for this scrape; at 0 the lag is absent, not outdated |

`/healthz` on the same port answers 200 if every sink of the process runs, else 503. Its JSON has the state of each sink
(`State`), and the code of its failure.

A batch counts once it is committed in the database: a failed batch does not count, a repeated batch does. The lag is
queried when Prometheus scrapes, so no batch waits for it.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from enum import StrEnum
from http import HTTPStatus
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outbox.base import scraped
from outbox.base.settings import Settings
from outbox.sink.remembering.generations import TopicOffsets
from outbox.sink.remembering.positions import Offsets
from outbox.sink.running.lag import Lag, LagLookup
from outbox.sink.writer import Counts

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# A batch of one event takes some 5 ms to apply, a full one half a second or more.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
HEALTH = "/healthz"

AskLag = Callable[[Mapping[str, Offsets]], Mapping[str, Lag] | None]


class State(StrEnum):
    """What a sink is doing."""

    STARTING = "starting"  # it has not begun to read
    RUNNING = "running"
    FAILING = "failing"  # it has failed, and starts itself again; until it has applied what it failed at
    FAILED = "failed"  # for good; its neighbours may run


class Metrics:
    """What the sinks of one process count, and their states. Any thread may call each method; none of them blocks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._next_offsets: dict[str, dict[str, Offsets]] = defaultdict(dict)  # by topic and sink
        self._rows = self._counter("rows", "Valid events read: applied, duplicate or refused")
        self._duplicates = self._counter("duplicates", "Events that were known and skipped")
        self._skipped = self._counter("skipped", "Events of types that the sink has not asked for")
        self._filtered = self._counter("filtered", "New events that the sink's transform leaves out")
        self._dead_letters = self._counter("dead_letters", "Records set aside, invalid or refused")
        self._duration = Histogram(
            "outbox_sink_batch_duration_seconds",
            "How long a stage of a batch took: read, apply",
            ["sink", "stage"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._progress = Gauge(
            "outbox_sink_last_progress_timestamp_seconds",
            "When the last batch was applied, or the sink started",
            ["sink"],
            registry=self.registry,
        )

        self._up = Gauge("outbox_sink_up", "Whether the sink's query runs", ["sink"], registry=self.registry)
        self._started = set[str]()
        self._states: dict[str, tuple[State, str | None]] = {}  # with the code of the failure

    def now(self, sink: str, state: State, code: str | None = None) -> None:
        """The sink is in this state from now on, because of the failure with this code if it is one."""
        self._states[sink] = state, code
        self._up.labels(sink).set(state is State.RUNNING)

    def health(self) -> dict[str, dict[str, str | None]]:
        """By sink its state, and the code of the failure if it has one."""
        return {sink: {"state": state.value, "failure": code} for sink, (state, code) in dict(self._states).items()}

    @property
    def is_healthy(self) -> bool:
        """Whether every sink runs."""
        return all(state is State.RUNNING for state, _ in dict(self._states).values())

    def started(self, sink: str, next_offsets: TopicOffsets) -> None:
        """A sink is about to read its topics from these offsets. All its metrics exist from now on, as 0."""
        for counter in (self._rows, self._duplicates, self._skipped, self._filtered, self._dead_letters):
            counter.labels(sink)
        for stage in ("read", "apply"):
            self._duration.labels(sink, stage)
        if sink not in self._started:  # starting again is no progress
            self._started.add(sink)
            self._progress.labels(sink).set_to_current_time()
        self._set_next(sink, next_offsets)

    def applied(self, sink: str, counts: Counts, next_offsets: TopicOffsets, read_s: float, apply_s: float) -> None:
        """A batch that ends before these offsets is committed in the database."""
        self._rows.labels(sink).inc(counts.rows)
        self._duplicates.labels(sink).inc(counts.duplicates)
        self._skipped.labels(sink).inc(counts.skipped)
        self._filtered.labels(sink).inc(counts.filtered)
        self._dead_letters.labels(sink).inc(counts.dead + counts.rejected)
        self._duration.labels(sink, "read").observe(read_s)
        self._duration.labels(sink, "apply").observe(apply_s)
        self._progress.labels(sink).set_to_current_time()
        self._set_next(sink, next_offsets)

    def collect_lag(self, ask: Mapping[str, AskLag]) -> None:
        """Add the lag to the metrics, queried at each scrape, topic by topic."""
        self.registry.register(_LagCollector(ask, self._next_offsets))

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(f"outbox_sink_{name}", documentation, ["sink"], registry=self.registry)

    def _set_next(self, sink: str, next_offsets: TopicOffsets) -> None:
        for topic, of_topic in next_offsets.items():
            self._next_offsets[topic][sink] = of_topic


@contextmanager
def served(settings: Settings, metrics: Metrics, topics: Collection[str]) -> Iterator[None]:
    """Serve the metrics, with the lag on these topics, over HTTP within the block; nothing at all if no port is set.

    Raises Failure if the port is taken.
    """
    host, port = settings.sink_metrics_host, settings.sink_metrics_port
    if port == 0:
        yield
        return
    with scraped.served(_app(metrics), host, port, "OUTBOX_SINK_METRICS_PORT"), ExitStack() as lookups:
        metrics.collect_lag({topic: lookups.enter_context(closing(LagLookup(settings, topic))).ask for topic in topics})
        yield


def _app(metrics: Metrics) -> WSGIApplication:
    """The health at its path, the metrics at any other."""
    others: WSGIApplication = make_wsgi_app(metrics.registry)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] != HEALTH:
            return others(environ, start_response)
        status = HTTPStatus.OK if metrics.is_healthy else HTTPStatus.SERVICE_UNAVAILABLE
        start_response(f"{status.value} {status.phrase}", [("Content-Type", "application/json")])
        return [json.dumps({"sinks": metrics.health()}).encode()]

    return app


class _LagCollector(Collector):
    """Queries the lag when it is scraped."""

    def __init__(self, ask: Mapping[str, AskLag], next_offsets: Mapping[str, Mapping[str, Offsets]]) -> None:
        self._ask = ask
        self._next_offsets = next_offsets

    def collect(self) -> Iterator[Metric]:
        answers = {topic: ask(dict(self._next_offsets.get(topic, {}))) for topic, ask in self._ask.items()}
        known = {topic: answer for topic, answer in answers.items() if answer is not None}
        is_up = len(known) == len(answers)
        yield GaugeMetricFamily("outbox_sink_kafka_up", "Whether Kafka answered for this scrape", is_up)
        events = _gauge("lag_events", "Events on its topics that are not applied, at most")
        by_partition = _gauge("partition_lag_events", "The same by topic and partition", "topic", "partition")
        age = _gauge("lag_seconds", "Age of the oldest record on its topics that is not applied")
        lags: dict[str, list[Lag]] = defaultdict(list)
        for topic, answer in known.items():
            for sink, lag in answer.items():
                lags[sink].append(lag)
                for partition, count in sorted(lag.offsets.items()):
                    by_partition.add_metric([sink, topic, str(partition)], count)
        unknown = {
            sink for topic in self._ask.keys() - known.keys() for sink in dict(self._next_offsets.get(topic, {}))
        }
        for sink, of_topics in lags.items():
            if sink in unknown:
                continue  # the sum of its other topics would be too low
            events.add_metric([sink], sum(count for lag in of_topics for count in lag.offsets.values()))
            age.add_metric([sink], max(lag.age_s for lag in of_topics))
        yield from (events, by_partition, age)


def _gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"outbox_sink_{name}", documentation, labels=["sink", *labels])
