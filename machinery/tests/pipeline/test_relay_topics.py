"""Several aggregates on several topics, on the real relay: each event on its topic, in order per key; a topic that is
missing or has too few partitions; and an aggregate that moves to another topic.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from psycopg2.extras import execute_values

from outbox.base.database import connect
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.kafka.spec import TopicSpec
from outbox.maintenance import prune
from outbox.maintenance.prune import PruneResult
from outbox.relay import connectors, lifecycle
from outbox.relay.rest import Rest
from outbox_lab.stack.postgres import Postgres
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.stack import topic_of
from tests.support import kept_rows, slots
from tests.support.declared import declare, work_for
from tests.support.outbox_rows import INSERT, Row, ids, insert, remove_guard, unfinished_transaction
from tests.support.topic_reader import Log, duplicates, out_of_order, read, relayed

STILL_S = 5.0


@pytest.fixture
def project(databases: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder of events: two aggregates on one topic, and one with a topic of its own."""
    events = work_for(tmp_path / "project", monkeypatch)
    suffix = databases.source_db_url.name.rpartition("_")[2]
    declare(events, "item", "received", partitions=2)
    declare(events, "Return", "returned", partitions=2, topic=f"{databases.topic_prefix}.{suffix}.item")
    declare(events, "Order", "placed", partitions=3, topic=f"Sales-{suffix}")
    return events


@pytest.fixture
def unapplied(project: Path, databases: Settings, stack: Stack) -> Iterator[Settings]:
    """The project's topics, and an outbox that takes undeclared events too; its connector is not made yet, and removed
    in the end.
    """
    del project
    with topic_of(databases, stack) as settings:
        remove_guard(settings)
        yield settings
        lifecycle.remove(settings, drop_slot=True)


def redeclare(project: Path, monkeypatch: pytest.MonkeyPatch, aggregate: str, *types: str, **options: object) -> Path:
    """Another version of the project, in which this aggregate is declared so."""
    copy = project.parent.with_name(f"{project.parent.name}+")
    shutil.copytree(project, work_for(copy, monkeypatch))
    declare(copy / "events", aggregate, *types, **options)
    return copy / "events"


def event(aggregate: str, key: str, version: int = 1) -> Row:
    types = {"item": "received", "Return": "returned", "Order": "placed"}
    payload = {"id": key, "version": version}
    return Row(aggregate, key, types.get(aggregate, "changed"), json.dumps(payload))


def history(keys: int, versions: int) -> list[Row]:
    """Events of keys that two aggregates share, numbered together, and of keys of the third, all mixed."""
    chance = random.Random(7)  # noqa: S311
    rows = []
    for version in range(1, versions + 1):
        for number in range(keys):
            rows += [event(chance.choice(["item", "Return"]), f"stock {number}", version)]
            rows += [event("Order", f"order {number}", version)]
    return rows


def insert_mixed(settings: Settings, rows: list[Row]) -> None:
    """The rows in transactions of random size."""
    chance, left = random.Random(8), list(rows)  # noqa: S311
    with closing(connect(settings, SourceRole.APP)) as connection, connection.cursor() as cursor:
        while left:
            size = chance.randint(1, 30)
            execute_values(cursor, INSERT, left[:size])
            connection.commit()
            del left[:size]


# Routing ----------------------------------------------------------------------------------------------------------


def test_every_event_is_on_its_topic_in_order_per_key(unapplied: Settings) -> None:
    rows = history(keys=12, versions=60)
    insert_mixed(unapplied, rows[:700])  # a snapshot relays these
    assert lifecycle.apply(unapplied) == "created"
    insert_mixed(unapplied, rows[700:])
    found = relayed(unapplied)
    suffix = unapplied.topic_prefix.rpartition(".")[2]
    expected = {"received": f"{unapplied.topic_prefix}.item", "placed": f"Sales-{suffix}"}
    expected["returned"] = expected["received"]
    assert {(record.headers["eventType"], record.topic) for record in found} == set(expected.items())
    assert (len(found), duplicates(found), out_of_order(found)) == (len(rows), 0, [])
    assert len({(record.topic, record.partition) for record in found}) == 2 + 3


def test_no_event_is_on_a_topic_that_is_not_declared(unapplied: Settings) -> None:
    lifecycle.apply(unapplied)
    insert(unapplied, event("item", "a"), event("Return", "a", 2), event("Order", "b"))
    relayed(unapplied)
    prune.mark(unapplied)
    name = unapplied.markers_topic
    wait_for("the markers", lambda: topics.last_stable_offsets(unapplied, name)[0] > 1, timeout_s=30)
    assert len(read(unapplied)) == 3
    own = {spec.name for spec in connectors.topic_specs(unapplied)}
    names = AdminClient(client_config(unapplied)).list_topics(timeout=30).topics
    found = {name for name in names if unapplied.topic_prefix in name or unapplied.connector in name}
    assert found == {name for name in own if not name.startswith("Sales-")}


def test_events_of_an_undeclared_topic_stop_the_relay_until_apply(
    unapplied: Settings, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task waits for the topic for good, and its state is RUNNING."""
    lifecycle.apply(unapplied)
    insert(unapplied, event("item", "a"))
    known = ids(unapplied)
    relayed(unapplied)
    insert(unapplied, event("plain", "a"), event("own", "a"), event("item", "a", 2))
    with suppress(TimeoutError), closing(Log(unapplied)) as log:
        wait_for("what must not come", lambda: len(log.read()) > len(known), timeout_s=STILL_S)
    assert lifecycle.status(unapplied).is_running
    assert [record.id for record in read(unapplied)] == known

    events = redeclare(project, monkeypatch, "plain")
    declare(events, "own", topic=f"{unapplied.connector}-own")
    assert lifecycle.apply(unapplied) == "updated"
    found = relayed(unapplied)
    assert (len(found), duplicates(found)) == (4, 0)
    assert {record.topic for record in found if record.headers["eventType"] == "changed"} == {
        f"{unapplied.topic_prefix}.plain",
        f"{unapplied.connector}-own",
    }


# Topics -----------------------------------------------------------------------------------------------------------


def partitions(settings: Settings) -> dict[str, int]:
    return {
        name: topic.partitions for name, topic in topics.existing(settings, connectors.load(settings).topics).items()
    }


def test_apply_creates_missing_topics_and_leaves_existing_ones(
    unapplied: Settings, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle.apply(unapplied)
    made = partitions(unapplied)
    assert sorted(made.values()) == [2, 3]
    name = f"{unapplied.topic_prefix}.bill"
    topics.create(unapplied, [TopicSpec(name, 5, {"retention.ms": "7200000"})])
    events = redeclare(project, monkeypatch, "bill", partitions=2)
    declare(events, "claim", partitions=1)
    assert lifecycle.apply(unapplied) == "unchanged", "default topics need no other routes"
    assert partitions(unapplied) == {**made, name: 5, f"{unapplied.topic_prefix}.claim": 1}
    assert topics.config(unapplied, name)["retention.ms"] == "7200000"


def test_a_topic_with_fewer_partitions_than_declared_is_refused(
    unapplied: Settings, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{unapplied.topic_prefix}.bill"
    topics.create(unapplied, [TopicSpec(name, 2, {})])
    events = redeclare(project, monkeypatch, "bill", partitions=3)
    with raises("topic-partitions", f"topic {name} has 2 partitions; 3 are required", "`partitions` in aggregate.toml"):
        lifecycle.apply(unapplied)
    assert lifecycle.status(unapplied).connector == "MISSING"

    # Kafka tells no `.` from `_` in the names of metrics.
    topics.create(unapplied, [TopicSpec(f"{unapplied.connector}.bills", 1, {})])
    redeclare(events, monkeypatch, "bill", topic=f"{unapplied.connector}_bills")
    with raises("topic-refused", f"{unapplied.connector}_bills", f"{unapplied.connector}.bills"):
        lifecycle.apply(unapplied)


# An aggregate moves -----------------------------------------------------------------------------------------------


def test_an_aggregate_that_moved_is_looked_up_on_its_former_topic(
    unapplied: Settings, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle.apply(unapplied)
    insert(unapplied, *(event("Order", "a", version) for version in range(1, 4)), event("item", "a"))
    relayed(unapplied)
    former = next(name for name in connectors.load(unapplied).topics if name.startswith("Sales-"))
    redeclare(project, monkeypatch, "Order", "placed", topic=f"{former}-2", partitions=3)
    with raises("routes-differ", "outbox connect apply"):
        prune.prune(unapplied, keep_hours=0)
    assert lifecycle.apply(unapplied) == "updated"
    insert(unapplied, event("Order", "a", 4))
    relayed(unapplied, ids(unapplied)[-1:])

    result = prune.prune(unapplied, keep_hours=0, sinks=False)
    assert result == PruneResult(deleted=2, on_their_way=3), "nothing says that there was a former topic"
    kept_rows.stand(unapplied, "dedup", former, topics.describe(unapplied, former).id)
    assert prune.prune(unapplied, keep_hours=0).deleted == 3
    assert ids(unapplied) == []


def test_a_slot_ahead_by_events_on_a_former_topic_is_no_loss(
    unapplied: Settings, project: Path, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle.apply(unapplied)
    with unfinished_transaction(unapplied):  # so that the server retains the log
        insert(unapplied, event("Order", "a"))
        relayed(unapplied)
        Rest(unapplied).stop()
        slots.wait_released(unapplied)
        slots.advance(unapplied)
        redeclare(project, monkeypatch, "Order", "placed", topic=f"{unapplied.connector}-moved", partitions=3)
        assert lifecycle.apply(unapplied) == "updated"
    insert(unapplied, event("Order", "a", 2))
    assert [record.topic for record in relayed(unapplied, ids(unapplied)[-1:])] == [f"{unapplied.connector}-moved"]
