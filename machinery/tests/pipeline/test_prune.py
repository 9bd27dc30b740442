"""Only events that are on a topic leave the outbox, by `outbox prune` and `outbox erase`: beside writers, interrupted,
behind a stopped connector, and with a slot that somebody has moved. Erased keys stay erased.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
import uuid
from collections.abc import Callable
from contextlib import closing

import pytest
from confluent_kafka import Producer
from psycopg2.extras import execute_values

from outbox.audit.check import check
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import records, topics
from outbox.kafka.clients import client_config
from outbox.maintenance import erase, prune
from outbox.maintenance.prune import PruneResult
from outbox.relay import arrivals, connectors, lifecycle, slot
from outbox.relay.rest import Rest
from outbox_lab.stack.postgres import Postgres
from outbox_lab.testing.command import environment, outbox, run
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.stack import relaying
from outbox_lab.testing.helpers import query
from tests.orders import MOMENT
from tests.support import kept_rows, slots
from tests.support.made_events import nth_key
from tests.support.outbox_rows import INSERT, Row, ids, insert, row, unfinished_transaction, writing
from tests.support.topic_reader import drop_records, out_of_order, read, relayed, topic_of

MIB = 2**20


def insert_at_once(settings: Settings, *rows: Row) -> None:
    """The rows in one transaction."""
    with closing(connect(settings, SourceRole.APP)) as connection, connection.cursor() as cursor:
        execute_values(cursor, INSERT, rows)
        connection.commit()


def markers(settings: Settings) -> int:
    """How many records the markers' topic has."""
    name = settings.markers_topic
    return sum(1 for _ in records.read(settings, name, topics.watermarks(settings, name)))


def test_what_was_relayed_goes_and_what_is_young_stays(shared_chain: Settings) -> None:
    insert(shared_chain, row(), row(), row())
    relayed(shared_chain)
    before = len(read(shared_chain))
    assert run(shared_chain, "prune", "--dry-run", "--keep-hours", "0").split()[:2] == ["outbox", "3"]
    assert len(ids(shared_chain)) == 3, "a dry run deletes nothing"
    sent = markers(shared_chain)

    assert prune.prune(shared_chain, keep_hours=1) == PruneResult()
    assert len(ids(shared_chain)) == 3

    assert prune.prune(shared_chain, keep_hours=0) == PruneResult(deleted=3)
    assert ids(shared_chain) == []
    wait_for("the markers", lambda: markers(shared_chain) == sent + 4, timeout_s=30)
    assert len(read(shared_chain)) == before, "no marker is on the topics of events"
    report = check(shared_chain)
    assert (report.findings, report.settled) == ([], True)


def test_behind_a_stopped_connector_only_relayed_events_are_deleted(shared_chain: Settings) -> None:
    insert(shared_chain, row())
    relayed(shared_chain)
    with slots.stopped(shared_chain):
        insert(shared_chain, row())
        assert prune.prune(shared_chain, keep_hours=0) == PruneResult(deleted=1, on_their_way=1)
        assert len(ids(shared_chain)) == 1
    relayed(shared_chain)
    assert prune.prune(shared_chain, keep_hours=0) == PruneResult(deleted=1)


def test_no_snapshot_is_open_while_topics_are_read(shared_chain: Settings) -> None:
    """A snapshot would keep vacuum from removing rows in the whole database."""
    insert(shared_chain, row(), row())
    relayed(shared_chain)
    seen: list[tuple[str, list[tuple[object, ...]]]] = []
    snapshots = "SELECT backend_xmin FROM pg_stat_activity WHERE usename = %s AND datname = current_database()"
    snapshots += " AND state <> 'active'"

    def report(line: str) -> None:
        pruner = shared_chain.role_name(SourceRole.PRUNER)
        seen.append((line.partition(" ")[0], query(shared_chain, snapshots, SourceRole.PRUNER, [pruner])))

    assert prune.prune(shared_chain, keep_hours=0, report=report).deleted == 2
    assert seen == [("looking", [(None,)])]


@pytest.mark.parametrize("work", ["prune", "continuity"])
def test_memory_is_that_of_one_look_up(shared_chain: Settings, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    """Ten times the events need no more of it.

    It runs before the tests that write many events, because each look-up reads the last ten minutes of the topic.
    """
    monkeypatch.setattr(arrivals, "LOOK_UP_EVENTS", 200)
    monkeypatch.setattr(records, "BATCH_RECORDS", 40)  # fewer than a look-up, to be a small part of the memory

    def peak(events: int) -> int:
        insert_at_once(shared_chain, *(row() for _ in range(events)))
        relayed(shared_chain)
        tracemalloc.start()
        try:
            if work == "continuity":
                assert arrivals.all_arrive(shared_chain, [], 60)
            deleted = prune.prune(shared_chain, keep_hours=0).deleted if work == "prune" else events
            assert deleted == events
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            prune.prune(shared_chain, keep_hours=0)

    one = peak(200)
    assert peak(2000) < 1.5 * one


def test_killed_between_its_transactions_it_is_run_again(shared_chain: Settings) -> None:
    insert_at_once(shared_chain, *(row() for _ in range(4500)))
    relayed(shared_chain)
    command = [sys.executable, "-m", "outbox", "prune", "--keep-hours", "0"]
    with closing(connect(shared_chain, SourceRole.OWNER)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", [ids(shared_chain)[2500]])  # in the third
        with subprocess.Popen(command, env=environment(shared_chain.home, **shared_chain.as_env())) as process:
            try:
                wait_for("two transactions", lambda: len(ids(shared_chain)) == 2500, timeout_s=60)
                with raises("prune-running"):
                    prune.prune(shared_chain, keep_hours=0)
            finally:
                process.kill()
    sessions = "SELECT 1 FROM pg_stat_activity WHERE usename = %s AND datname = current_database()"
    pruner = shared_chain.role_name(SourceRole.PRUNER)
    wait_for("it to end", lambda: not query(shared_chain, sessions, SourceRole.OWNER, [pruner]), timeout_s=30)
    assert len(ids(shared_chain)) == 2500
    assert prune.prune(shared_chain, keep_hours=0).deleted == 2500
    assert ids(shared_chain) == []


def test_beside_a_writer_each_event_is_on_the_topic_and_then_goes(shared_chain: Settings) -> None:
    before = {record.id for record in read(shared_chain)}
    deleted, rounds = 0, 0
    with writing(shared_chain, seed=uuid.uuid4().int % 10**6) as writer:
        while writer.committed < 3000 or rounds < 3:
            deleted += prune.prune(shared_chain, keep_hours=0).deleted
            rounds += 1
        assert deleted > 0
    relayed(shared_chain)
    deleted += prune.prune(shared_chain, keep_hours=0).deleted
    records = [record for record in read(shared_chain) if record.id not in before]
    assert (writer.interruptions, ids(shared_chain)) == (0, [])
    assert deleted == writer.committed == len({record.id for record in records})
    assert out_of_order(records) == []


def test_on_a_schedule_it_lets_go_of_the_log_of_a_busy_neighbour(shared_chain: Settings, postgres: Postgres) -> None:
    def lag_after_prune() -> int:
        prune.prune(shared_chain, keep_hours=24)
        postgres.psql("CHECKPOINT")  # logs running transactions, as the server does by itself every 15 s
        return slots.existing(shared_chain).lag_bytes

    lag_after_prune()
    big = "CREATE TABLE neighbour AS SELECT repeat('x', 1000) FROM generate_series(1, 20000)"
    query(shared_chain, big, SinkRole.OWNER)
    postgres.psql("CHECKPOINT")
    assert slots.existing(shared_chain).lag_bytes > 20 * MIB
    wait_for("the log to be let go of", lambda: lag_after_prune() < MIB, timeout_s=60)


@pytest.mark.parametrize("end", [Producer.flush, Producer.abort_transaction], ids=["open", "aborted"])
def test_an_uncommitted_record_proves_nothing(shared_chain: Settings, end: Callable[[Producer, float], object]) -> None:
    with slots.stopped(shared_chain):
        insert(shared_chain, row())
        producer = Producer({**client_config(shared_chain), "transactional.id": f"other-{uuid.uuid4()}"})
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(topic_of(shared_chain), b"{}", partition=0, headers=[("id", ids(shared_chain)[0])])
        producer.flush(30)
        end(producer, 30)
        assert prune.prune(shared_chain, keep_hours=0) == PruneResult(on_their_way=1)
    if end is Producer.flush:
        producer.abort_transaction(30)
    relayed(shared_chain)
    assert prune.prune(shared_chain, keep_hours=0) == PruneResult(deleted=1)


@pytest.mark.usefixtures("whole_day")
def test_the_command_forgets_days_that_nothing_can_bring_again(shared_chain: Settings) -> None:
    insert(shared_chain, row())
    relayed(shared_chain)
    kept_rows.remember(shared_chain, kept_rows.aged(9))
    kept_rows.land(shared_chain, kept_rows.aged(120), kept_rows.aged(1))
    would = json.loads(run(shared_chain, "prune", "--dry-run", "--json"))["retention"]
    assert (len(would["dropped"]), would["deleted"]) == (1, {"landed_events": 1})
    assert len(kept_rows.names(shared_chain)) == 1
    told = run(shared_chain, "prune")
    assert f"dropped {would['dropped'][0]}" in told
    assert "deleted 1 rows of landed_events" in told
    assert kept_rows.names(shared_chain) == []


def test_what_is_not_on_the_topic_is_never_deleted(chain: Settings) -> None:
    """The slot has skipped two events and the topic has dropped one, and stored offset and slot are past all three."""
    item = str(uuid.uuid4())  # all in one partition
    with unfinished_transaction(chain):
        insert(chain, row(item, 1), row(item, 2))
        records = relayed(chain)
        with slots.stopped(chain) as rest:
            insert(chain, row(item, 3), row(item, 4))
            skipped = ids(chain)[2:]
            slots.advance(chain)
            rest.resume()  # by somebody who does not `apply`, which would refuse
    insert(chain, row(item, 5))
    relayed(chain, ids(chain)[-1:])
    assert not {record.id for record in read(chain)} & set(skipped), "the slot delivered them after all"
    end = slot.end_of_log(chain)  # behind every event
    drop_records(chain, topic_of(chain), records[0].offset + 1, records[0].partition)
    dropped = ids(chain)[0]
    assert prune.prune(chain, keep_hours=0) == PruneResult(deleted=2, on_their_way=3)

    query(chain, "UPDATE outbox SET occurred_at = occurred_at - make_interval(hours => 1)", SourceRole.OWNER)
    assert prune.prune(chain, keep_hours=0) == PruneResult(missing=3, first_missing=dropped)

    def passed() -> bool:
        stored = Rest(chain).offset()
        return stored is not None and min(stored.lsn, slots.existing(chain).confirmed_lsn) >= end

    wait_for("stored offset and slot to pass all events", passed, timeout_s=90)
    command = ("prune", "--json", "--keep-hours", "0")
    told = outbox(*command, home=chain.home, **chain.as_env())
    assert (told.returncode, json.loads(told.stdout)["outbox"]["deleted"]) == (1, 0)
    assert f"3 old events on no topic ({dropped} …)" in told.stderr
    assert connectors.load(chain).start_again in told.stderr
    assert ids(chain) == [dropped, *skipped]

    # What it says is the way out.
    lifecycle.remove(chain, drop_slot=True)
    lifecycle.apply(chain)
    relayed(chain)
    run(chain, *command)
    assert ids(chain) == []


# Erase -------------------------------------------------------------------------------------------------------------

KEY, OTHER, ITEM, OTHER_ITEM = (nth_key(number) for number in (81, 82, 83, 84))
STORY = "0b7c9a44-my-neighbour-has-seen-the-parcel"


def order(type_: str, key: str, version: int, **more: object) -> Row:
    payload = {"order_id": key, "version": version, "occurred_at": MOMENT, **more}
    return Row("order", key, type_, json.dumps(payload))


def found(settings: Settings, aggregate: str, key: str) -> dict[str, int]:
    """Where there is anything of a key."""
    report = outbox("erase", aggregate, key, "--check", "--json", home=settings.home, **settings.as_env()).stdout
    return {place: rows for place, rows in json.loads(report)["found"].items() if rows}


def output(settings: Settings, *words: str, status: int = 0) -> str:
    """All that a command has printed, its log too."""
    done = outbox(*words, home=settings.home, **settings.as_env())
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_erased_keys_stay_erased(topic: Settings) -> None:
    for key in (KEY, OTHER):
        insert(topic, order("placed", key, 1, item_id=ITEM, quantity=1), order("cancelled", key, 2, reason=STORY))
    insert(topic, order("cancelled", KEY, 3, reason=STORY * 10))  # longer than its schema allows
    insert(topic, row(ITEM), row(OTHER_ITEM))
    query(topic, f"INSERT INTO orders VALUES ('{KEY}', 3), ('{OTHER}', 2)")
    query(topic, f"INSERT INTO items VALUES ('{ITEM}', 'KGM', 5, 1), ('{OTHER_ITEM}', 'KGM', 5, 1)")
    with raises("events-not-on-topic"):
        erase.erase(topic, erase.subject(topic, "order", KEY))
    with relaying(topic):
        assert arrivals.all_arrive(topic, [], 120)
        shown = [output(topic, "sink", "orders", "activity", "lakehouse", "--until-caught-up")]
        report = check(topic)
        assert [one.code for one in report.findings] == ["malformed-records", "sink-parked", "sink-parked"]
        shown += [output(topic, "check", status=1), output(topic, "check", "--json", status=1)]
        shown += [run(topic, "dead-letters", "list"), run(topic, "dead-letters", "list", "--json")]

        of_order = {"outbox": 3, "dead letters": 2, "orders.erase.sql of sink orders": 1}
        assert found(topic, "order", KEY) == of_order
        assert found(topic, "item", ITEM) == {"outbox": 1, "table of sink lakehouse": 1}
        for aggregate, key in (("order", KEY), ("item", ITEM)):
            run(topic, "erase", aggregate, key, "--check", status=1)
            shown.append(run(topic, "erase", aggregate, key, "--yes"))
            shown.append(run(topic, "erase", aggregate, key, "--check"))
        assert all(f"topic {topic.topic_prefix}.{name}: until 2" in "".join(shown) for name in ("order", "item"))

        run(topic, "rebuild", "orders", "--from", "topic", "--yes")
        run(topic, "rewind", "lakehouse", "--to-earliest", "--yes")
        run(topic, "sink", "lakehouse", "--until-caught-up")
        assert found(topic, "order", KEY) == found(topic, "item", ITEM) == {}
        orders = "SELECT order_id::text, reason FROM orders"
        assert query(topic, orders, SinkRole.OWNER) == [(OTHER, STORY)]
        assert found(topic, "item", OTHER_ITEM)["table of sink lakehouse"] == 1
        assert check(topic).findings == []
    assert [text for text in shown if STORY in text] == []
    logs = [file for file in (topic.home / "logs").rglob("*") if file.is_file()]
    assert len(logs) >= 3
    assert [file for file in logs if STORY.encode() in file.read_bytes()] == []
