"""The second connector and its sink, beside the outbox's: made, killed, forgotten, made again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from random import Random
from typing import Any

import pytest
from confluent_kafka import Producer

from outbox.audit import check
from outbox.audit.doctor import examine
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka.clients import client_config
from outbox.relay import connectors, lifecycle, slot
from outbox.relay.connectors import Connector
from outbox.sink.repair import rewind
from outbox_lab.testing.command import outbox
from outbox_lab.testing.helpers import chosen_seed, query
from stock.service import create_app
from tests.stock import Client
from tests.support import slots, topic_reader
from tests.support.made_events import nth_key
from tests.support.sink_driver import Database
from tests.support.sink_process import catch_up, logged, reported_failure
from tests.support.topic_reader import Log, Record

NAMES = ("source_db_url", "sink_db_url", "topic_prefix", "connector")


@pytest.fixture
def changes(chain: Settings) -> Iterator[Connector]:
    """The connector, which a test makes itself; it is removed in the end."""
    connector = connectors.load(chain, "changes")
    yield connector
    lifecycle.remove(chain, connector, drop_slot=True)


@pytest.fixture
def service(chain: Settings) -> Client:
    return Client(create_app(chain.replace(service_threads=8)), chain)


def connect(settings: Settings, *arguments: str) -> Any:
    """Run `outbox connect`."""
    env = {f"OUTBOX_{name.upper()}": str(getattr(settings, name)) for name in NAMES}
    return outbox("connect", *arguments, home=settings.home, **env)


class Movements:
    """Movements of six items, by the service."""

    def __init__(self, client: Client, seed: int) -> None:
        self._client = client
        self._random = Random(seed)  # noqa: S311
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


def test_the_whole_way_beside_the_outbox(chain: Settings, changes: Connector, service: Client) -> None:
    """Both connectors relay and both sinks apply, side by side; and what is made for the second can be taken back."""
    movements = Movements(service, chosen_seed())
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


def test_what_comes_twice_and_what_is_forgotten(chain: Settings, changes: Connector, service: Client) -> None:
    """A slot that somebody else has read is refused; the way out is a snapshot, which brings rows that are known."""
    movements = Movements(service, chosen_seed())
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
    assert report.sink("changes").drift == {}

    # The same changes under the same LSN at other offsets: what a worker does that is killed without exactly-once.
    producer = Producer(client_config(chain))
    for record in records:
        producer.produce(changes.topic, record.value.encode(), record.key.encode(), partition=record.partition)
    assert producer.flush(30) == 0
    with closing(Log(chain, [changes.topic])) as log:
        records = log.read()
    assert len(records) - len(set(identities(records))) == len(records) / 2, "all of them twice on the topic"
    again = catch_up(chain, "changes")
    assert again.returncode == 0, again.stderr
    assert sum(int(str(line["applied"])) for line in logged(again, "applied")) == 0
    assert check.check(chain).findings == []
