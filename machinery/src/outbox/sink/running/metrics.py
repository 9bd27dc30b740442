"""Prometheus metrics of the sinks of one process, and the port that they are scraped from.

`/healthz` on the same port answers 200 if every sink of the process runs, else 503. Its JSON has the state of each sink
(`State`), and the code of its failure.

A batch counts once it is committed in the database: a failed batch does not count, a repeated batch does. The lag is
queried when Prometheus scrapes, so no batch waits for it. Spark's Kafka source commits nothing to a consumer group, so
no tool of Kafka knows the lag.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, Message, TopicPartition
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outbox.base import scraped
from outbox.base.errors import Failure
from outbox.base.settings import Settings, address
from outbox.kafka.clients import consumer
from outbox.sink.remembering.positions import TopicOffsets
from outbox.sink.writer import Counts

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

# A batch of one event takes some 5 ms to apply, a full one half a second or more.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
COUNTERS = {  # by name, of what
    "rows": "Valid events read: applied, duplicate, refused or filtered",
    "duplicates": "Events that the strategy knew and skipped",
    "skipped": "Events on its topics that the sink has not asked for; it passes them",
    "filtered": "New events that the transform leaves out",
    "dead_letters": "Records set aside, invalid or refused; a repetition counts again",
}
HEALTH = "/healthz"
TIMEOUT_S = 5.0  # of one look-up, all of it; Prometheus waits 10 s for a scrape
MIN_WAIT_S = 0.001  # librdkafka takes 0 for "whatever is there", and a negative time for "forever"
LOOKUP: Mapping[str, str | bool] = {
    "enable.partition.eof": True,  # a lag of markers alone has no record to wait for
    "max.partition.fetch.bytes": "65536",  # one record per partition is needed; it arrives with its whole batch
}
PASSING_ERRORS = {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}  # librdkafka tries again by itself


class Lag(NamedTuple):
    """The lag of one sink.

    ``offsets``: by topic and partition, the last stable offset minus the next offset to apply. That is the number of
    events that are committed and not applied, or slightly more, because transaction markers and aborted records take
    offsets too. 0 means that nothing is missing.

    ``age_s``: seconds since the broker received the oldest committed record that is not applied; 0.0 if all are
    applied. It compares two clocks, the broker's and ours.
    """

    offsets: TopicOffsets
    age_s: float


AskLag = Callable[[Mapping[str, TopicOffsets]], Mapping[str, Lag] | None]


class State(StrEnum):
    """The state of a sink."""

    STARTING = "starting"  # it has not begun to read
    RUNNING = "running"
    FAILING = "failing"  # it has failed, and starts itself again; until it has applied what it failed at
    FAILED = "failed"  # for good; its neighbours may run


class Metrics:
    """Counts and states of the sinks of one process. Any thread may call each method; none of them blocks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._next_offsets: dict[str, TopicOffsets] = {}  # by sink
        self._counters = {
            name: Counter(f"outbox_sink_{name}", text, ["sink"], registry=self.registry)
            for name, text in COUNTERS.items()
        }
        self._duration = Histogram(
            "outbox_sink_batch_duration_seconds",
            "How long a stage took: read (with decoding) or apply; of a large batch by part",
            ["sink", "stage"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._progress = Gauge(
            "outbox_sink_last_progress_timestamp_seconds",
            "Unix time of the last applied batch; before it, of the first start",
            ["sink"],
            registry=self.registry,
        )
        help_of_up = "1 while the sink runs; 0 while it starts, fails or has failed"
        self._up = Gauge("outbox_sink_up", help_of_up, ["sink"], registry=self.registry)
        self._started = set[str]()
        self._states: dict[str, tuple[State, str | None]] = {}  # with the code of the failure

    def now(self, sink: str, state: State, code: str | None = None) -> None:
        """The sink is in this state from now on, because of the failure with this code if it is one."""
        self._states[sink] = state, code
        self._up.labels(sink).set(state is State.RUNNING)

    def health(self) -> dict[str, dict[str, str | None]]:
        """By sink its state, and the code of the failure if it has one."""
        return {sink: {"state": state.value, "failure": code} for sink, (state, code) in dict(self._states).items()}

    def started(self, sink: str, next_offsets: TopicOffsets) -> None:
        """A sink is about to read its topics from these offsets. All its metrics exist from now on, as 0."""
        for counter in self._counters.values():
            counter.labels(sink)
        for stage in ("read", "apply"):
            self._duration.labels(sink, stage)
        if sink not in self._started:  # starting again is no progress
            self._started.add(sink)
            self._progress.labels(sink).set_to_current_time()
        self._next_offsets[sink] = next_offsets

    def applied(self, sink: str, counts: Counts, next_offsets: TopicOffsets, read_s: float, apply_s: float) -> None:
        """A batch that ends before these offsets is committed in the database."""
        counted = {**counts._asdict(), "dead_letters": counts.dead + counts.rejected}
        for name, counter in self._counters.items():
            counter.labels(sink).inc(counted[name])
        self._duration.labels(sink, "read").observe(read_s)
        self._duration.labels(sink, "apply").observe(apply_s)
        self._progress.labels(sink).set_to_current_time()
        self._next_offsets[sink] = next_offsets

    def collect_lag(self, ask: AskLag) -> None:
        """Add the lag to the metrics, queried at each scrape."""
        self.registry.register(_LagCollector(ask, self._next_offsets))


@contextmanager
def served(settings: Settings, metrics: Metrics) -> Iterator[None]:
    """Serve the metrics, with the lag, over HTTP within the block; nothing at all without an address for it.

    Raises Failure if the port is taken.
    """
    if settings.sink_metrics is None:
        yield
        return
    metrics.collect_lag(partial(ask_lag, settings))
    with scraped.served(_app(metrics), address(settings.sink_metrics), "OUTBOX_SINK_METRICS"):
        yield


def _app(metrics: Metrics) -> WSGIApplication:
    """The health at its path, the metrics at any other."""
    others: WSGIApplication = make_wsgi_app(metrics.registry)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] != HEALTH:
            return others(environ, start_response)
        sinks = metrics.health()
        all_run = all(one["state"] == State.RUNNING for one in sinks.values())
        status = HTTPStatus.OK if all_run else HTTPStatus.SERVICE_UNAVAILABLE
        start_response(f"{status.value} {status.phrase}", [("Content-Type", "application/json")])
        return [json.dumps({"sinks": sinks}).encode()]

    return app


class _LagCollector(Collector):
    """Queries the lag when it is scraped."""

    def __init__(self, ask: AskLag, next_offsets: Mapping[str, TopicOffsets]) -> None:
        self._ask = ask
        self._next_offsets = next_offsets

    def collect(self) -> Iterator[Metric]:
        lags = self._ask({**self._next_offsets})
        yield GaugeMetricFamily(
            "outbox_sink_kafka_up",
            "1 if Kafka answered for this scrape; at 0 the lag is absent, not outdated",
            lags is not None,
        )
        events = _gauge("lag_events", "Events not applied, at most: markers, aborted and skipped records count too")
        by_partition = _gauge("partition_lag_events", "The same by topic and partition", "topic", "partition")
        age = _gauge("lag_seconds", "Age of the oldest record that is not applied; 0 when all are applied")
        for sink, lag in (lags or {}).items():
            counts = {
                (topic, partition): count for topic, one in lag.offsets.items() for partition, count in one.items()
            }
            for (topic, partition), count in sorted(counts.items()):
                by_partition.add_metric([sink, topic, str(partition)], count)
            events.add_metric([sink], sum(counts.values()))
            age.add_metric([sink], lag.age_s)
        yield from (events, by_partition, age)


def _gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"outbox_sink_{name}", documentation, labels=["sink", *labels])


def ask_lag(
    settings: Settings, next_offsets: Mapping[str, TopicOffsets], timeout_s: float = TIMEOUT_S
) -> dict[str, Lag] | None:
    """Ask Kafka for the lag of each sink, given the next offsets that each will apply. A partition without an offset is
    at 0.

    Returns None if Kafka did not answer in time, or does not have all of the topics; never raises an error.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with consumer(settings, others=LOOKUP) as client:
            names = {topic for of_sink in next_offsets.values() for topic in of_sink}
            ends = {topic: _ends(client, topic, deadline) for topic in names}
            return {sink: _lag(client, ends, of_sink, deadline) for sink, of_sink in next_offsets.items()}
    except (Failure, TimeoutError):
        return None


def _ends(client: Consumer, topic: str, deadline: float) -> dict[int, int]:
    """By partition the last stable offset. Partitions may be added, so they are asked for each time."""
    metadata = client.list_topics(topic, timeout=_left_s(deadline)).topics[topic]
    if metadata.error is not None:
        raise KafkaException(metadata.error)
    ends = {}
    for partition in metadata.partitions:
        found = client.get_watermark_offsets(TopicPartition(topic, partition), timeout=_left_s(deadline))
        if found is None:
            raise TimeoutError
        ends[partition] = found[1]
    return ends


def _lag(client: Consumer, ends: TopicOffsets, next_offsets: TopicOffsets, deadline: float) -> Lag:
    # Never below 0, also if the sink advanced meanwhile or a topic was recreated.
    offsets = {
        topic: {partition: max(0, end - of_topic.get(partition, 0)) for partition, end in ends[topic].items()}
        for topic, of_topic in next_offsets.items()
    }
    behind = [
        TopicPartition(topic, partition, next_offsets[topic].get(partition, 0))
        for topic, of_topic in offsets.items()
        for partition, count in of_topic.items()
        if count
    ]
    oldest_s = _oldest_s(client, behind, deadline) if behind else None
    return Lag(offsets, 0.0 if oldest_s is None else max(0.0, time.time() - oldest_s))


def _oldest_s(client: Consumer, behind: Sequence[TopicPartition], deadline: float) -> float | None:
    """When the broker received the oldest committed record at or after these offsets, as Unix time in seconds."""
    waiting, found_s = {(place.topic, place.partition) for place in behind}, []
    client.assign([*behind])
    while waiting:
        message = client.poll(_left_s(deadline))
        if message is None or _is_passing(message):
            continue
        topic, partition = message.topic(), message.partition()
        if topic is None or partition is None or (topic, partition) not in waiting:
            continue
        waiting.remove((topic, partition))
        # Its other records would be polled before the first record of another partition.
        client.incremental_unassign([TopicPartition(topic, partition)])
        kind, at_ms = message.timestamp()
        if message.error() is None and kind != TIMESTAMP_NOT_AVAILABLE:
            found_s.append(at_ms / 1000)
    return min(found_s, default=None)


def _is_passing(message: Message) -> bool:
    """Whether it is a transient error. Raises KafkaException for one that is not."""
    error = message.error()
    if error is None or error.code() == KafkaError._PARTITION_EOF:
        return False
    if error.code() not in PASSING_ERRORS:
        raise KafkaException(error)
    return True


def _left_s(deadline: float) -> float:
    """Seconds left, never none. Raises TimeoutError past the deadline."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return max(left_s, MIN_WAIT_S)
