"""The evidence on a real topic, slot and outbox: each place alone holds a day that could be forgotten without it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from confluent_kafka import Message, Producer
from psycopg2 import extensions

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import DatabaseUrl, Settings, SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import clients, records, topics
from outbox.kafka.clients import client_config
from outbox.kafka.spec import TopicSpec
from outbox.maintenance import retention
from outbox.maintenance.retention import RetentionResult
from outbox.relay import connectors
from outbox.sink import discovery
from outbox_lab.stack.postgres import Postgres
from outbox_lab.testing.helpers import query
from tests.support import kept_rows, slots
from tests.support.kept_rows import aged, ago, partition, remember
from tests.support.made_events import JOB
from tests.support.outbox_rows import insert, row
from tests.support.topic_reader import delete_topics, drop_records, topic_of

pytestmark = pytest.mark.usefixtures("whole_day")

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

INSERT = "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) VALUES (%s, 'item', 'a', 'received', '{}')"
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


def names(result: RetentionResult) -> list[str]:
    return [dropped.name for dropped in result.dropped]


def outcome(result: RetentionResult) -> tuple[list[str], list[str]]:
    """What was dropped, and the places that keep the horizon from being raised further."""
    day = min((found.day for found in result.evidence), default=date.max)
    return names(result), [found.place for found in result.evidence if found.day == day]


@pytest.fixture
def settled(topic: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """A slot, an empty topic and outbox, and a sink that has applied events of 9 and of 6 days ago, and of today.

    Timeouts are short, for tests in which nothing comes.
    """
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
        query(settings, INSERT, parameters=[event_id])
    else:
        kept_rows.set_aside(settings, event_id, event_id, sink="naive")


@contextmanager
def writing(settings: Settings, event_id: str) -> Iterator[extensions.connection]:
    """An event in the outbox, in a transaction that does not end by itself."""
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection.cursor() as cursor:
        cursor.execute(INSERT, [event_id])
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
    assert names(would) == [partition(9), partition(6)]
    assert names(expire(settled, dry_run=True)) == names(would), "a dry run has dropped nothing"
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
    query(settled, INSERT, parameters=[aged(6)])
    query(settled, "DELETE FROM outbox")
    assert outcome(retention.expire(settled)) == ([], ["write-ahead log"])
    assert names(expire(settled)) == [partition(9), partition(6)]


def test_below_the_horizon_and_without_a_usable_id_nothing_holds_anything(settled: Settings) -> None:
    put(settled, "outbox", aged(6))
    assert names(expire(settled)) == [partition(9)]
    query(settled, "DELETE FROM outbox")
    for place in PLACES:
        put(settled, place, aged(8))
        put(settled, place, f"{aged(6)[:14]}4{aged(6)[15:]}")  # it is never applied
    assert names(expire(settled)) == [partition(6)]


def test_a_former_topic_that_sinks_have_read_holds_its_day(settled: Settings) -> None:
    """An aggregate was moved from there; a sink that begins anew might read it again."""
    name = f"{settled.connector}-former"
    topics.create(settled, [TopicSpec(name, 1, {})])
    producer = Producer(client_config(settled))
    producer.produce(name, b"{}", headers=[("id", aged(6))])
    assert producer.flush(30) == 0
    assert names(expire(settled, dry_run=True)) == [partition(9), partition(6)], "no sink has read it"
    kept_rows.stand(settled, "naive", name, topics.describe(settled, name).id)
    assert outcome(expire(settled)) == ([partition(9)], [f"topic {name}"])
    delete_topics(settled, name)
    assert names(expire(settled)) == [partition(6)]


def test_an_open_transaction_on_a_topic_hides_events_of_any_day(settled: Settings) -> None:
    producer = Producer({**client_config(settled), "transactional.id": f"open-{settled.connector}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic_of(settled, "order"), b"{}", partition=0, headers=[("id", aged(6))])
    producer.flush(30)
    assert outcome(expire(settled)) == ([], [f"topic {topic_of(settled, 'order')}"])
    producer.commit_transaction(30)
    assert names(expire(settled)) == [partition(9)]


def test_a_transaction_that_does_not_end_might_have_written_events_of_any_day(settled: Settings) -> None:
    with writing(settled, aged(6)):
        assert outcome(expire(settled)) == ([], ["transactions that write events"])


def test_a_transaction_that_ends_meanwhile_is_seen(settled: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "WRITERS_TIMEOUT_S", 30)
    monkeypatch.setattr(retention, "CONFIRM_TIMEOUT_S", 30)
    with writing(settled, aged(6)) as connection, ThreadPoolExecutor(1) as pool:

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


def log(settings: Settings, sink: str, topic_id: str, *offsets: int, partition: int = 0) -> None:
    statement = 'INSERT INTO event_log (sink, topic_id, partition, "offset") SELECT %s, %s, %s, unnest(%s)'
    kept_rows.query(settings, statement, sink, topic_id, partition, [*offsets], role=SinkRole.WRITER)


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
    log(topic, "offset-log", item, *range(10))
    log(topic, "offset-log", item, 0, partition=1)
    log(topic, "offset-log", order, 5)  # without a position, the sink may read that topic again
    log(topic, "offset-log", "an earlier topic", 5)
    log(topic, "without positions", item, 0)
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
        cursor.execute(INSERT, [aged(0)])
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
