"""What may be forgotten. Only events that are on a topic leave the outbox, by `outbox prune` and `outbox erase`: beside
writers, interrupted, behind a stopped connector, and with a slot that somebody has moved. Sinks forget ids of days that
nothing can bring again: each place alone holds a day.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from confluent_kafka import Message, Producer
from psycopg2 import extensions
from psycopg2.extras import execute_values

from outbox.audit.check import check
from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import DatabaseUrl, Settings, SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import clients, records, topics
from outbox.kafka.clients import client_config
from outbox.kafka.spec import TopicSpec
from outbox.maintenance import erase, prune, retention
from outbox.maintenance.prune import PruneResult
from outbox.maintenance.retention import RetentionResult
from outbox.relay import arrivals, connectors, lifecycle, slot
from outbox.relay.rest import Rest
from outbox.sink import discovery
from outbox_lab.stack.postgres import Postgres
from outbox_lab.testing.command import environment, outbox, run
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.stack import relaying
from outbox_lab.testing.helpers import query
from tests.orders import MOMENT
from tests.support import kept_rows, slots
from tests.support.kept_rows import aged, ago, partition, remember
from tests.support.made_events import JOB, nth_key
from tests.support.outbox_rows import INSERT, Row, ids, insert, row, unfinished_transaction, writing
from tests.support.topic_reader import delete_topics, drop_records, out_of_order, read, relayed, topic_of

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


# Ids that sinks remember -------------------------------------------------------------------------------------------

EVENT_LOG = """
CREATE TABLE event_log (
    sink text, topic_id text, partition integer, "offset" bigint, name text,
    PRIMARY KEY (sink, topic_id, partition, "offset")
);
GRANT SELECT, INSERT ON event_log TO {writer};
GRANT SELECT, DELETE ON event_log TO {pruner};
"""
OFFSET_LOG = """
-- memory: event_log by topic_id partition offset
INSERT INTO public.event_log (sink, topic_id, partition, "offset")
SELECT %(sink)s, %(topic_id)s, batch.partition, batch."offset"
  FROM pg_temp.outbox_batch AS batch;
"""

INSERT_ID = (
    "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) VALUES (%s, 'item', 'a', 'received', '{}')"
)
# A session whose latest statement has looked for transactions that write events.
LOOK = """
SELECT 1 FROM pg_stat_activity
 WHERE datname = current_database() AND query LIKE '%RowExclusiveLock%' AND pid <> pg_backend_pid()
"""


def relay(settings: Settings) -> None:
    """A commit, which writes out what lies before it in the log, and its confirmation."""
    insert(settings, row())
    slots.advance(settings)


def expire(settings: Settings, *, dry_run: bool = False) -> RetentionResult:
    """Retention, with a relay that confirms what it reads."""
    return retention.expire(settings, dry_run=dry_run, nudge=lambda: relay(settings))


def dropped(result: RetentionResult) -> list[str]:
    return [one.name for one in result.dropped]


def outcome(result: RetentionResult) -> tuple[list[str], list[str]]:
    """What was dropped, and the places that keep the horizon from being raised further."""
    day = min((found.day for found in result.evidence), default=date.max)
    return dropped(result), [found.place for found in result.evidence if found.day == day]


@pytest.fixture
def settled(topic: Settings, whole_day: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """A slot, an empty topic and outbox, and a sink that has applied events of 9 and of 6 days ago, and of today.

    Timeouts are short, for tests in which nothing comes.
    """
    del whole_day
    monkeypatch.setattr(retention, "NUDGE_EVERY_S", 0.05)
    for name in ("WRITERS_TIMEOUT_S", "CONFIRM_TIMEOUT_S", "TOPIC_TIMEOUT_S"):
        monkeypatch.setattr(retention, name, 0.5)
    with slot_of(topic, topic.connector):
        remember(topic, aged(9), aged(6), aged(0))
        yield topic


@contextmanager
def slot_of(settings: Settings, name: str) -> Iterator[None]:
    query(settings, f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')", SourceRole.CDC)
    yield
    drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s"
    query(settings, drop, SourceRole.CDC, [name])


def produce(settings: Settings, *ids: str | bytes | None, aggregate: str = "item") -> None:
    """Records with these ids, in partition 0 of an aggregate's topic, and one without a header."""
    name, producer = topic_of(settings, aggregate), Producer(client_config(settings))
    for event_id in ids:
        producer.produce(name, b"{}", partition=0, headers=[("id", event_id)])
    producer.produce(name, b"{}", partition=0)
    assert producer.flush(30) == 0


PLACES = {
    "topic": "topic {}.item",
    "other topic": "topic {}.order",
    "outbox": "outbox table",
    "letter": "open dead letters",
}


def put(settings: Settings, place: str, event_id: str) -> None:
    """An event in one of the places."""
    if place == "topic":
        produce(settings, event_id, "no id", "0" * 36, b"\xff", None)
    elif place == "other topic":
        produce(settings, event_id, aggregate="order")
    elif place == "outbox":
        query(settings, INSERT_ID, parameters=[event_id])
    else:
        kept_rows.set_aside(settings, event_id, event_id, sink="naive")


@contextmanager
def unfinished(settings: Settings, event_id: str) -> Iterator[extensions.connection]:
    """An event in the outbox, in a transaction that does not end by itself."""
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection.cursor() as cursor:
        cursor.execute(INSERT_ID, [event_id])
        yield connection


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """Every record that is read from a topic."""
    found: list[Message] = []
    read = records.read

    def counted(settings: Settings, name: str, within: Mapping[int, tuple[int, int]]) -> Iterator[Message]:
        for message in read(settings, name, within):
            found.append(message)
            yield message

    monkeypatch.setattr(records, "read", counted)
    return found


def test_without_any_evidence_all_but_today_and_yesterday_is_dropped(settled: Settings) -> None:
    lines: list[str] = []
    would = expire(settled, dry_run=True)
    assert dropped(would) == [partition(9), partition(6)]
    assert dropped(expire(settled, dry_run=True)) == dropped(would), "a dry run has dropped nothing"
    done = retention.expire(settled, report=lines.append, nudge=lambda: relay(settled))
    assert outcome(done) == ([partition(9), partition(6)], ["clock"])
    said = [line.partition(":")[0] for line in lines]
    assert said[-3:] == ["clock", f"dropped {partition(9)}", f"dropped {partition(6)}"]
    assert {place.format(settled.topic_prefix) for place in PLACES.values()} < {*said}
    assert expire(settled) == RetentionResult(ago(1)), "and then there is nothing to forget"


@pytest.mark.parametrize("place", PLACES)
def test_an_event_in_one_place_alone_holds_its_day_back(settled: Settings, place: str) -> None:
    put(settled, place, aged(6))
    assert outcome(expire(settled)) == ([partition(9)], [PLACES[place].format(settled.topic_prefix)])


def test_what_the_slot_has_not_confirmed_holds_everything_back(settled: Settings) -> None:
    query(settled, INSERT_ID, parameters=[aged(6)])
    query(settled, "DELETE FROM outbox")
    assert outcome(retention.expire(settled)) == ([], ["write-ahead log"])
    assert dropped(expire(settled)) == [partition(9), partition(6)]


def test_below_the_horizon_and_without_a_usable_id_nothing_holds_anything(settled: Settings) -> None:
    put(settled, "outbox", aged(6))
    assert dropped(expire(settled)) == [partition(9)]
    query(settled, "DELETE FROM outbox")
    for place in PLACES:
        put(settled, place, aged(8))
        put(settled, place, f"{aged(6)[:14]}4{aged(6)[15:]}")  # it is never applied
    assert dropped(expire(settled)) == [partition(6)]


def test_a_former_topic_that_sinks_have_read_holds_its_day(settled: Settings) -> None:
    """An aggregate was moved from there; a sink that begins anew might read it again."""
    name = f"{settled.connector}-former"
    topics.create(settled, [TopicSpec(name, 1, {})])
    producer = Producer(client_config(settled))
    producer.produce(name, b"{}", headers=[("id", aged(6))])
    assert producer.flush(30) == 0
    assert dropped(expire(settled, dry_run=True)) == [partition(9), partition(6)], "no sink has read it"
    kept_rows.stand(settled, "naive", name, topics.describe(settled, name).id)
    assert outcome(expire(settled)) == ([partition(9)], [f"topic {name}"])
    delete_topics(settled, name)
    assert dropped(expire(settled)) == [partition(6)]


def test_an_open_transaction_on_a_topic_hides_events_of_any_day(settled: Settings) -> None:
    producer = Producer({**client_config(settled), "transactional.id": f"open-{settled.connector}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic_of(settled, "order"), b"{}", partition=0, headers=[("id", aged(6))])
    producer.flush(30)
    assert outcome(expire(settled)) == ([], [f"topic {topic_of(settled, 'order')}"])
    producer.commit_transaction(30)
    assert dropped(expire(settled)) == [partition(9)]


def test_a_transaction_that_does_not_end_might_have_written_events_of_any_day(settled: Settings) -> None:
    with unfinished(settled, aged(6)):
        assert outcome(expire(settled)) == ([], ["transactions that write events"])


def test_a_transaction_that_ends_meanwhile_is_seen(settled: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "WRITERS_TIMEOUT_S", 30)
    monkeypatch.setattr(retention, "CONFIRM_TIMEOUT_S", 30)
    with unfinished(settled, aged(6)) as connection, ThreadPoolExecutor(1) as pool:

        def end_once_seen() -> None:
            wait_for("retention to see it", lambda: query(settled, LOOK, SourceRole.AUDITOR), timeout_s=30)
            connection.commit()

        pool.submit(end_once_seen)
        assert outcome(expire(settled)) == ([partition(9)], ["outbox table"])


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("kafka_bootstrap", "127.0.0.1:1", "Kafka at"),
        ("topic_prefix", "no.such", "no.such.item"),
        ("connector", "no_such_slot", "slot no_such_slot does not exist"),
        ("source_db_url", DatabaseUrl(name="source", port=1), "database source"),
    ],
)
def test_a_place_that_cannot_be_read_fails_before_anything_is_dropped(
    settled: Settings, setting: str, value: object, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting == "kafka_bootstrap":  # a server that never answers
        monkeypatch.setattr(clients, "REQUEST_TIMEOUT_S", 1.0)
    elsewhere = settled.replace(**{setting: value})
    with pytest.raises(Failure, match=message):
        retention.expire(elsewhere, nudge=lambda: relay(settled))
    assert len(kept_rows.names(settled)) == 3


def test_topics_are_read_until_a_record_holds_everything(settled: Settings, reads: list[Message]) -> None:
    produce(settled, aged(5), aged(9), *(aged(5) for _ in range(200)))
    assert outcome(expire(settled)) == ([], [f"topic {topic_of(settled)}"])
    assert len(reads) == 1 + 2, "the first of each partition, and then all"


def log_events(settings: Settings, sink: str, topic_id: str, *offsets: int, partition: int = 0) -> None:
    statement = 'INSERT INTO event_log (sink, topic_id, partition, "offset") SELECT %s, %s, %s, unnest(%s)'
    kept_rows.query(settings, statement, sink, topic_id, partition, [*offsets], role=SinkRole.WRITER)


@pytest.mark.usefixtures("whole_day")
def test_the_event_log_ends_where_the_topic_begins(
    topic: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that the topic has dropped cannot come again under its offset; any other is still a duplicate.

    The project's sink has a strategy that remembers the places of events, in a table of the project's own.
    """
    file = tmp_path / "offset-log.sql"
    writer, pruner = topic.role_name(SinkRole.WRITER), topic.role_name(SinkRole.PRUNER)
    kept_rows.query(topic, EVENT_LOG.format(writer=writer, pruner=pruner))
    file.write_text(OFFSET_LOG)
    jobs = [*discovery.jobs(topic), replace(JOB, name="offset-log", strategy=file)]
    monkeypatch.setattr(discovery, "jobs", lambda _: jobs)
    produce(topic, *(aged(0) for _ in range(9)))
    item, order = (topics.describe(topic, topic_of(topic, name)).id for name in ("item", "order"))
    kept_rows.start(topic, "without positions")
    kept_rows.stand(topic, "offset-log", topic_of(topic), item, offset=10)
    log_events(topic, "offset-log", item, *range(10))
    log_events(topic, "offset-log", item, 0, partition=1)
    log_events(topic, "offset-log", order, 5)  # without a position, the sink may read that topic again
    log_events(topic, "offset-log", "an earlier topic", 5)
    log_events(topic, "without positions", item, 0)
    assert expire(topic).deleted == {"event_log": 1}, "the topic that was deleted"
    drop_records(topic, topic_of(topic), before=4)
    assert expire(topic, dry_run=True).deleted == {"event_log": 4}
    assert expire(topic).deleted == {"event_log": 4}
    places = {("offset-log", item, 0, offset) for offset in range(4, 10)}
    places |= {("offset-log", item, 1, 0), ("offset-log", order, 0, 5), ("without positions", item, 0, 0)}
    assert {*kept_rows.query(topic, 'SELECT sink, topic_id, partition, "offset" FROM event_log')} == places


@pytest.fixture
def captured(topic: Settings) -> Iterator[Settings]:
    """A captured table's slot and its empty topic, which a sink reads."""
    connector = connectors.load(topic, "changes")
    specs = connectors.topic_specs(topic, connector)
    topics.create(topic, specs)
    kept_rows.stand(topic, "changes", connector.topic, topics.describe(topic, connector.topic).id)
    with slot_of(topic, connector.name):
        yield topic
    delete_topics(topic, *(spec.name for spec in specs))


def change(settings: Settings, *lsns: int) -> None:
    """Changes at these positions on the topic."""
    producer = Producer(client_config(settings))
    name = connectors.load(settings, "changes").topic
    for lsn in lsns:
        producer.produce(name, json.dumps({"op": "u", "source": {"lsn": lsn}}), partition=0)
    producer.produce(name, b"no change", partition=0)
    assert producer.flush(30) == 0


def apply_changes(settings: Settings, *lsns: int) -> None:
    statement = "INSERT INTO processed_changes SELECT 'changes', 'items', 'a', unnest(%s::bigint[]), 'u'"
    kept_rows.query(settings, statement, [*lsns], role=SinkRole.WRITER)


def applied_changes(settings: Settings) -> list[int]:
    return [int(str(lsn)) for (lsn,) in kept_rows.query(settings, "SELECT lsn FROM processed_changes ORDER BY lsn")]


def test_a_change_goes_when_neither_log_nor_topic_can_bring_it(captured: Settings, reads: list[Message]) -> None:
    connector = connectors.load(captured, "changes")
    apply_changes(captured, 100, 200, 300)
    change(captured, 200, 100, 300)
    assert expire(captured).deleted == {}, "the topic has it, if not at its begin"
    drop_records(captured, connector.topic, before=2)
    assert expire(captured).deleted == {"processed_changes": 2}
    assert applied_changes(captured) == [300]
    reads.clear()
    assert expire(captured).deleted == {}
    assert len(reads) == 1, "the first record holds the only one"

    drop_records(captured, connector.topic, before=4)
    other = Producer({**client_config(captured), "transactional.id": f"other-{aged(0)}"})
    other.init_transactions(30)
    other.begin_transaction()
    other.produce(connector.topic, json.dumps({"source": {"lsn": 300}}), partition=0)
    other.flush(30)
    assert expire(captured).deleted == {}, "an open transaction may have it"
    other.abort_transaction(30)
    query(captured, f"SELECT pg_drop_replication_slot('{connector.name}')", SourceRole.CDC)
    assert expire(captured).deleted == {}, "nothing says what the log may bring"
    with slot_of(captured, connector.name):
        assert expire(captured).deleted == {"processed_changes": 1}


def test_a_confirmed_change_stays_while_the_log_may_bring_it(captured: Settings, postgres: Postgres) -> None:
    """A transaction that is open while others are confirmed has written before them."""
    connector = connectors.load(captured, "changes")
    with closing(connect(captured, SourceRole.OWNER)) as long, long.cursor() as cursor:
        cursor.execute(INSERT_ID, [aged(0)])
        cursor.execute("SELECT pg_current_wal_insert_lsn() - '0/0'")
        ((written,),) = cursor.fetchall()
        for _ in range(3):
            insert(captured, row())
            postgres.psql("CHECKPOINT")  # logs the running transactions, on every version
        slots.advance(captured, connector)
        found = slots.existing(captured, connector)
        assert found.restart_lsn <= int(written) < found.confirmed_lsn
        apply_changes(captured, int(written), 100)
        assert expire(captured).deleted == {"processed_changes": 1}
    assert applied_changes(captured) == [int(written)]
