"""Whole chains: every strategy at once, where what they promise to survive really happens; a trace that leads from a
request to the batches of sinks; and a captured table beside the outbox.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from random import Random
from subprocess import CompletedProcess
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Proto

from outbox.audit import check
from outbox.audit.doctor import examine
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.relay import connectors, lifecycle, slot
from outbox.relay.connectors import Connector
from outbox.sink.repair import rewind
from outbox_lab.stack.command import SinkProcess, sink
from outbox_lab.testing.command import outbox
from outbox_lab.testing.helpers import chosen_seed, query, seeded
from outbox_lab.walkthrough.faults import Window
from tests.stock import Client, move, serving
from tests.support import slots, topic_reader
from tests.support.collector import collecting
from tests.support.made_events import STRATEGIES, nth_key, sums
from tests.support.sink_driver import Database
from tests.support.sink_process import (
    TIMEOUT_S,
    Publisher,
    catch_up,
    checkpoint,
    logged,
    reported_failure,
    running_plain,
    running_warm,
    wait_caught_up,
)
from tests.support.topic_reader import Log, Record, duplicates, read, relayed, topic_of

ALL = sorted(STRATEGIES)


def quantities(records: Iterable[Record]) -> Counter[str]:
    """By item, what these records add up to."""
    totals: Counter[str] = Counter()
    for record in records:
        totals[record.key] += json.loads(record.value)["quantity"]
    return totals


def in_batch(settings: Settings, name: str, batch: int, records: Iterable[Record]) -> list[Record]:
    """The records of a planned batch."""
    ends = []
    for number in (batch - 1, batch):  # the last line of a plan has the offsets where it ends, by topic and partition
        plan = checkpoint(settings, name) / "offsets" / str(number)
        (partitions,) = json.loads(plan.read_text().splitlines()[-1]).values()
        ends.append({int(partition): offset for partition, offset in partitions.items()})
    first, last = ends
    return [one for one in records if first.get(one.partition, 0) <= one.offset < last.get(one.partition, 0)]


def test_each_strategy_drifts_by_just_what_it_does_not_survive(chain: Settings, client: Client) -> None:
    random = seeded(chosen_seed(), 0)
    items = [nth_key(number) for number in range(4)]

    def move(count: int) -> None:
        for _ in range(count):
            assert client.move(random.choice(items), random.randint(1, 10**6)).status_code == 201

    move(60)
    relayed(chain)
    sinks = sink(chain, *ALL)
    sinks.start_timeout_s = TIMEOUT_S
    try:
        sinks.start()
        wait_caught_up(sinks, chain, ALL)
        lifecycle.remove(chain, drop_slot=True)
        lifecycle.apply(chain)  # a new snapshot: the whole outbox is sent again
        wait_for("the events to be sent again", lambda: duplicates(read(chain)) == 60, timeout_s=TIMEOUT_S)
        wait_caught_up(sinks, chain, ALL)
        with closing(Window(chain, sinks, ALL)) as window:  # the database of each has committed, and Spark has not
            crashes = window.kill_in_it(lambda: move(40))
        assert all(one.fired for one in crashes.values()), crashes
        killed_in = {name: one.planned_batch for name, one in crashes.items()}
    finally:
        sinks.kill()
    records = relayed(chain)
    done = catch_up(chain, *ALL)
    assert done.returncode == 0, done.stderr
    first = {str(line["sink"]): line["batch"] for line in reversed(logged(done, "applied"))}
    assert first == killed_in, "Spark delivered each batch again"

    assert (len(records), duplicates(records)) == (160, 60)
    times = Counter(record.id for record in records)
    by_re_sends = quantities({record.id: record for record in records if times[record.id] > 1}.values())
    by_re_reads = quantities(in_batch(chain, "naive", killed_in["naive"], records))
    assert any(by_re_sends.values())
    assert any(by_re_reads.values())
    report = check.check(chain)
    assert report.settled
    for name in ALL:
        due: Counter[str] = Counter()
        if name in ("offsets", "naive"):  # the others know an event that is sent again
            due.update(by_re_sends)
        if name == "naive":
            due.update(by_re_reads)
        assert report.sink(name).drift == {key: quantity for key, quantity in due.items() if quantity}, name


@pytest.mark.parametrize("run", [running_warm, running_plain])
def test_partitions_added_while_sinks_run_are_read_whole(
    topic: Settings, run: Callable[..., AbstractContextManager[SinkProcess]]
) -> None:
    before = Publisher(topic)
    some = before.events(60, keys=40)
    before.send(some)
    with run(topic, *ALL) as sinks:
        wait_caught_up(sinks, topic, ALL)
        admin = AdminClient(client_config(topic))
        admin.create_partitions([NewPartitions(topic_of(topic), 7)])[topic_of(topic)].result(10)
        known = lambda: topics.describe(topic, topic_of(topic)).partitions == 7  # noqa: E731
        wait_for("brokers to know the partitions", known, timeout_s=30)
        after = Publisher(topic, continued=before)  # one that knows of the new partitions
        more = after.events(120, keys=40)
        after.send(more)
        assert all(topics.last_stable_offsets(topic, topic_of(topic)).get(partition, 0) for partition in (4, 5, 6))
        wait_caught_up(sinks, topic, ALL)
    for name in ALL:
        assert Database(topic, name).totals() == sums([*some, *more]), name
        assert set(Database(topic, name).positions()) == set(range(7))


def test_a_batch_id_that_comes_again_with_other_rows(topic: Settings) -> None:
    """The host died before its disk had the newest log files, and events have come since: a larger batch, one id."""
    publisher = Publisher(topic)
    some = publisher.events(90)
    for part in (some[:30], some[30:60]):
        publisher.send(part)
        done = catch_up(topic, *ALL)
        assert done.returncode == 0, done.stderr
    commits = {name: (checkpoint(topic, name) / "commits").glob("[0-9]*") for name in ALL}
    batches = {name: max(int(file.name) for file in files) for name, files in commits.items()}
    for name, batch in batches.items():
        for log in ("offsets", "commits"):
            (checkpoint(topic, name) / log / str(batch)).unlink()
    publisher.send(some[60:])
    done = catch_up(topic, *ALL)
    assert done.returncode == 0, done.stderr
    again = [(line["sink"], line["batch"], line["rows"]) for line in logged(done, "applied")]
    assert sorted(again) == sorted((name, batch, 60) for name, batch in batches.items()), "30 more under its id"
    for name in ALL:
        due = [*some, *some[30:60]] if name == "naive" else some
        assert Database(topic, name).totals() == sums(due), name


# Traces -------------------------------------------------------------------------------------------------------------


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
    expected = {"messaging.destination.name": topic_of(chain), "outbox.sink": "dedup", "outbox.batch.applied": 3}
    assert expected.items() <= batch.attributes.items()
    of_trace = [record.id for record in records if sampled in (record.headers["traceparent"] or "")]
    assert sorted(str(link.attributes["messaging.message.id"]) for link in batch.links) == sorted(of_trace)
    for link in batch.links:
        assert 0 < float(link.attributes["outbox.lag_ms"]) < 1000 * (time.monotonic() - began)


# A captured table: the second connector and its sink ------------------------------------------------------------------


@pytest.fixture
def changes(chain: Settings) -> Iterator[Connector]:
    """The connector, which a test makes itself; it is removed in the end."""
    connector = connectors.load(chain, "changes")
    yield connector
    lifecycle.remove(chain, connector, drop_slot=True)


def connect(settings: Settings, *arguments: str) -> CompletedProcess[str]:
    return outbox("connect", *arguments, home=settings.home, **settings.as_env())


class Movements:
    """Movements of six items, by the service."""

    def __init__(self, client: Client) -> None:
        self._client, self._random = client, Random(chosen_seed())  # noqa: S311
        self._items = [nth_key(number) for number in range(1, 7)]
        for item in self._items:
            self._move(item, 1_000_000)

    def make(self, count: int) -> None:
        for _ in range(count):
            item, other = self._random.sample(self._items, 2)
            quantity = self._random.randint(1, 1000)
            self._move(item, -quantity)
            self._move(other, quantity)

    def _move(self, item: str, quantity: int) -> None:
        assert self._client.move(item, quantity).status_code == 201


def identities(records: list[Record]) -> list[tuple[Any, ...]]:
    """By what the sink knows each of them."""
    values = [json.loads(record.value) for record in records]
    return [(record.key, value["source"]["lsn"], value["op"]) for record, value in zip(records, values, strict=True)]


def test_the_whole_way_beside_the_outbox(chain: Settings, changes: Connector, client: Client) -> None:
    """Both connectors relay and both sinks apply, side by side; and what is made for the second can be taken back."""
    movements = Movements(client)
    movements.make(10)  # they come by the snapshot
    assert "`outbox connect apply` creates" in reported_failure(catch_up(chain, "changes"))
    assert connect(chain, "status", "changes").stderr.endswith("its tasks none — `outbox connect apply changes`\n")
    assert connect(chain, "apply", "changes").stdout.startswith(f"connector {changes.name}: created, exactly-once")
    topic_reader.captured(chain, changes, "items")  # until the snapshot has ended: its rows are no changes
    # Debezium would send messages of other applications to a topic that does not exist, and wait for that for good.
    for is_transactional in ("true", "false"):
        query(chain, f"SELECT pg_logical_emit_message({is_transactional}, 'another', 'text')", SourceRole.APP)
    movements.make(10)
    assert {operation for _, _, operation in identities(topic_reader.captured(chain, changes, "items"))} == {"r", "u"}
    assert lifecycle.apply(chain, changes) == "unchanged"
    assert lifecycle.apply(chain) == "unchanged"

    done = catch_up(chain, "dedup", "changes")
    assert done.returncode == 0, done.stderr
    report = check.check_settled(chain, timeout_s=60)
    found = [(sink.name, sink.drift, sink.in_flight) for sink in report.sinks]
    assert sorted(found) == [("changes", {}, 0), ("dedup", {}, 0)]
    assert report.findings == []
    of_events, of_changes = Database(chain).totals(), Database(chain, "changes").totals()
    assert of_events == of_changes
    assert len(of_events) == 6

    # Read again from the beginning: each is known.
    assert rewind.rewind(chain, "changes", rewind.to_earliest(chain, "changes")) == 1
    movements.make(5)
    topic_reader.captured(chain, changes, "items")
    again = catch_up(chain, "changes")
    assert again.returncode == 0, again.stderr
    assert sum(int(str(line["duplicates"])) for line in logged(again, "applied")) >= 6
    assert check.check(chain).sink("changes").drift == {}

    # A sink that is not up to date is behind, and not wrong.
    movements.make(5)
    report = check.check(chain)
    assert (report.sink("changes").in_flight, report.sink("changes").drift) == (10, {})

    findings = {(finding.hop, finding.message) for finding in examine(chain) if not finding.is_ok}
    assert {hop for hop, _ in findings} == {"sinks"}, "both sinks have ended"
    assert any(text.startswith("sink changes is not running; it is ") for _, text in findings)

    assert connect(chain, "remove", "changes", "--yes").returncode == 0
    unread = f"nobody reads slot {changes.name}"
    wait_for("doctor to see that", lambda: any(unread in one.message for one in examine(chain)), timeout_s=30)
    assert connect(chain, "remove", "changes", "--yes", "--drop-slot").stdout == (
        f"connector {changes.name}: was not there\n"
    )
    assert slot.read(chain, changes) is None
    assert query(chain, "SELECT pubname FROM pg_publication") == [("outbox",)]
    assert lifecycle.status(chain).is_running, "the other one goes on"


def test_what_a_slot_has_forgotten_comes_by_a_snapshot(chain: Settings, changes: Connector, client: Client) -> None:
    """A slot that somebody else has read is refused; the way out is a snapshot."""
    movements = Movements(client)
    lifecycle.apply(chain, changes)
    movements.make(10)
    topic_reader.captured(chain, changes, "items")
    assert catch_up(chain, "changes").returncode == 0

    lifecycle.remove(chain, changes)
    movements.make(10)
    slots.wait_released(chain, changes)
    slots.advance(chain, changes)
    refused = connect(chain, "apply", "changes")
    assert refused.returncode == 1
    assert f"slot {changes.name} is at" in refused.stderr
    assert "`outbox connect remove changes --drop-slot`, then `outbox connect apply changes`" in refused.stderr
    assert check.check(chain).sink("changes").in_flight == 20, "in no slot, and never to come as they were"

    # A snapshot brings the state of all, and while it is taken the service goes on.
    lifecycle.remove(chain, changes, drop_slot=True)
    with closing(Log(chain, [changes.topic])) as log:
        before = len(log.read())
    lifecycle.apply(chain, changes)
    movements.make(10)
    records = topic_reader.captured(chain, changes, "items")
    assert sum(json.loads(record.value)["op"] == "r" for record in records[before:]) > 0
    assert len(set(identities(records))) == len(records), "a snapshot's rows are new, though their state may be known"
    assert catch_up(chain, "changes").returncode == 0
    report = check.check_settled(chain, timeout_s=60)
    assert (report.sink("changes").drift, report.findings) == ({}, [])
