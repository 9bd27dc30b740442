"""Personal data on real databases: what erasing a key removes, and what keeps it from coming back; and messages of the
database and details of a projection, which repeat no value.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import psycopg2
import pytest

from outbox.base.database import connect, reason_of
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.events import catalog
from outbox.kafka.topics import Topic
from outbox.maintenance import erase
from outbox.maintenance.erase import Subject
from outbox.relay import arrivals
from outbox.sink import discovery
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.decoding.batch import Returned
from outbox.sink.decoding.layout import PLACE
from outbox.sink.decoding.records import Record
from outbox.sink.remembering import fence, positions
from outbox.sink.repair import rebuild, replay
from outbox.sink.repair.replay import Selection
from outbox.sink.writer import Counts
from outbox_lab.testing import query, run
from outbox_lab.testing.failures import raises
from tests.orders import cancelled, placed
from tests.seen import Seen, create_tables
from tests.support import declared_sinks
from tests.support.declared import TOML, Events, payload
from tests.support.declared_sinks import batch_of, record
from tests.support.kept_rows import has_waiting
from tests.support.made_events import TOPIC_ID, fetch, nth_key, uuid7
from tests.support.sink_driver import driving, projections_in

RANDOM = Random(93)  # noqa: S311
KEY, OTHER = nth_key(71), nth_key(72)
STORY = "f3b0a1d2-my-neighbour-has-seen-the-parcel"


def apply(settings: Settings, *records: Record, sink: str = "orders", copy: str = "") -> Counts:
    """Apply records as the next batch of a sink, or of a copy of it."""
    spec = discovery.chosen(settings, sink)
    [topic] = [one for one in spec.topics if one.endswith(".order")]
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        writer = PostgresWriter(connection, replace(spec, name=copy or sink), fetch)
        start = writer.positions(topic, TOPIC_ID).get(0, 0)
        return writer.apply(batch_of(spec, topic, *records, start=start))


def subject(settings: Settings, key: str = KEY, aggregate: str = "order") -> Subject:
    return erase.subject(settings, aggregate, key)


def found(settings: Settings) -> dict[str, int]:
    """Where there is anything of the key."""
    return {place: rows for place, rows in erase.erase(settings, subject(settings), dry_run=True).items() if rows}


def rows(settings: Settings, key: str = KEY) -> list[tuple[object, ...]]:
    """Sinks that have an order."""
    return query(settings, f"SELECT sink FROM orders WHERE order_id = '{key}'", SinkRole.OWNER)


def history(key: str) -> list[Record]:
    return [placed(key, 1), cancelled(key, 2, STORY)]


def unreadable(key: str) -> Record:
    """A record whose free text is too long."""
    return cancelled(key, 3, STORY * 10)


def test_a_key_is_erased_in_each_sink_and_nothing_else_is(databases: Settings) -> None:
    for sink in ("orders", "activity"):
        apply(databases, *history(KEY), unreadable(KEY), *history(OTHER), unreadable(OTHER), sink=sink)
    assert found(databases) == {"dead letters": 2, "orders.erase.sql of sink orders": 1}
    assert len(rows(databases)) == 1, "a dry run changes nothing"
    erase.erase(databases, subject(databases))
    assert found(databases) == {}
    assert (rows(databases), rows(databases, OTHER)) == ([], [("orders",)])
    letters = "SELECT convert_from(key, 'UTF8') FROM dead_letters ORDER BY sink"
    assert query(databases, letters, SinkRole.OWNER) == [(OTHER,), (OTHER,)]
    for (table,) in query(databases, "SELECT relid::regclass::text FROM pg_stat_user_tables", SinkRole.OWNER):
        of_key = f"FROM {table} AS one WHERE one::text LIKE '%{KEY}%' AND one::text LIKE '%neighbour%'"
        assert query(databases, f"SELECT 1 {of_key}", SinkRole.OWNER) == [], table


def test_no_delivery_brings_an_erased_key_back_and_later_events_are_applied(databases: Settings) -> None:
    before = [*history(KEY), unreadable(KEY)]
    apply(databases, *before)
    erase.erase(databases, subject(databases))
    # A copy knows no event yet, as a sink whose memory is gone.
    of_copy = apply(databases, *before, *history(OTHER), copy="orders.rebuild")
    assert (of_copy.applied, of_copy.duplicates, of_copy.dead) == (2, 2, 1)
    assert found(databases) == {}
    assert rows(databases, OTHER) == [("orders.rebuild",)]
    after = placed(KEY, 4)
    later = uuid7(RANDOM, round(time.time() * 1000) + 60_000).encode()
    assert apply(databases, after._replace(headers=[("id", later), *after.headers[1:]])).applied == 1
    assert rows(databases) == [("orders",)]


def test_a_replay_applies_no_event_of_an_erased_key(databases: Settings) -> None:
    apply(databases, unreadable(KEY))
    connection = connect(databases, SinkRole.WRITER)
    with closing(connection):
        chosen = Selection(sink="orders").choose(connection)
        erase.erase(databases, subject(databases))
        specs = {"orders": discovery.chosen(databases, "orders")}
        done = replay.replay(connection, specs, chosen, applier_of=PostgresApplier)
    assert sum(done["orders"]) == 0
    assert found(databases) == {}


def test_a_transaction_that_has_begun_is_erased_too(databases: Settings) -> None:
    apply(databases, placed(OTHER, 1))
    erasing = threading.Thread(target=erase.erase, args=(databases, subject(databases)))
    with closing(connect(databases, SinkRole.WRITER)) as connection, connection, connection.cursor() as cursor:
        fence.lock(cursor, "orders")  # as a driver does for each batch
        erasing.start()
        wait_for("it to wait", lambda: has_waiting(databases), timeout_s=20)
        insert = "INSERT INTO orders (sink, order_id, reason, version) VALUES ('orders', %s, %s, 1)"
        cursor.execute(insert, (KEY, STORY))
    erasing.join(60)
    assert not erasing.is_alive()
    assert found(databases) == {}


def test_a_failure_in_one_sink_erases_in_none(databases: Settings) -> None:
    apply(databases, *history(KEY), unreadable(KEY))
    query(databases, "ALTER TABLE orders RENAME TO moved", SinkRole.OWNER)
    with raises("database-not-migrated", "orders.erase.sql"):
        erase.erase(databases, subject(databases))
    query(databases, "ALTER TABLE moved RENAME TO orders", SinkRole.OWNER)
    assert query(databases, "SELECT count(*) FROM erased_keys", SinkRole.OWNER) == [(0,)]
    assert found(databases) == {"dead letters": 1, "orders.erase.sql of sink orders": 1}
    erase.erase(databases, subject(databases))
    assert found(databases) == {}


def test_landed_events_of_the_key_are_erased(databases: Settings) -> None:
    spec = discovery.chosen(databases, "merge")
    [topic] = spec.topics
    with closing(connect(databases, SinkRole.OWNER)) as connection, connection, connection.cursor() as cursor:
        positions.write(cursor, "merge", topic, TOPIC_ID, {0: 3})
        for key, event_type in ((KEY, "item.received"), (OTHER, "item.received"), (KEY, "invoice.sent")):
            event = json.dumps({"item_id": key, "event_type": event_type})
            cursor.execute("INSERT INTO landed_events VALUES ('merge', %s, %s)", (uuid7(RANDOM), event))
    assert erase.erase(databases, subject(databases, aggregate="item"))["landed_events"] == 1
    left = "SELECT event ->> 'item_id', event ->> 'event_type' FROM landed_events ORDER BY 2, 1"
    assert query(databases, left, SinkRole.OWNER) == [(KEY, "invoice.sent"), (OTHER, "item.received")]


@pytest.mark.parametrize(
    ("names", "has_transform"),
    [(["order.placed.v1", "order.cancelled.v1"], False), (["order"], True), (["order.placed"], True)],
    ids=["by versions", "through a transform", "one event through a transform"],
)
def test_landed_events_are_erased_under_any_name_and_without_the_column_of_the_key(
    databases: Settings, tmp_path: Path, names: list[str], has_transform: bool
) -> None:
    """A transform may drop the key, and leave events out, which have landed too."""
    projections, known = projections_in(tmp_path, "SELECT 1"), catalog.of_project(databases)
    spec = declared_sinks.sink(known, *names, projections=projections, name="landing", by="merge")
    spec = replace(spec, job=replace(spec.job, transform="any:thing" if has_transform else None))
    [topic] = spec.topics
    batch = batch_of(spec, topic, placed(OTHER, 1), *history(KEY), cancelled(OTHER, 2))
    with driving(databases, spec) as writer:
        if has_transform:
            returned = batch.chunk.frame.select([*PLACE, "version"]).slice(0, 2)
            writer.prepare(returned.schema)
            batch = replace(batch, returned=Returned(returned))
        landed = writer.apply(batch).rows
    assert erase.erase(databases, subject(databases))["landed_events"] == landed / 2
    assert found(databases) == {}
    assert query(databases, "SELECT count(*) FROM landed_events", SinkRole.OWNER) == [(landed / 2,)]


def test_an_event_whose_id_is_ahead_of_the_clock_does_not_come_back(
    databases: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms, hour_ms = round(time.time() * 1000), 3_600_000
    near, far = (uuid7(RANDOM, now_ms + hours * hour_ms) for hours in (12, 48))
    insert = (
        "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) VALUES (%s, 'order', %s, 'placed', '{}')"
    )
    for event_id in (near, far):
        query(databases, insert, SourceRole.APP, (event_id, KEY))
    monkeypatch.setattr(arrivals, "missing", lambda *_: {})  # the topic has them
    erase.erase(databases, subject(databases))
    before, after = (placed(KEY, version) for version in (1, 2))
    ids = near, uuid7(RANDOM, now_ms + 13 * hour_ms)
    one, other = (
        record._replace(headers=[("id", event_id.encode()), *record.headers[1:]])
        for record, event_id in zip((before, after), ids, strict=True)
    )
    assert apply(databases, one) == Counts(rows=1, duplicates=1)
    assert apply(databases, other) == Counts(rows=1, applied=1), "no sink takes the id that is 48 hours ahead"


def test_a_rebuild_from_the_source_leaves_an_erased_key_out(databases: Settings) -> None:
    for key in (KEY, OTHER):
        query(databases, f"INSERT INTO items (id, unit, stock, version) VALUES ('{key}', 'KGM', 5, 2)")
    erase.erase(databases, subject(databases, aggregate="item"))
    spec = discovery.chosen(databases, "dedup")
    here = [Topic(topic, TOPIC_ID, 1) for topic in spec.topics]
    rebuild.from_source(databases, spec, here, {topic.name: {0: 0} for topic in here})
    totals = "SELECT key::text FROM sink_totals WHERE sink = 'dedup' AND total <> 0"
    assert query(databases, totals, SinkRole.OWNER) == [(OTHER,)]
    # The service has written of the key since: its state is no longer the erased one.
    query(databases, f"UPDATE items SET version = 3 WHERE id = '{KEY}'")
    rebuild.from_source(databases, spec, here, {topic.name: {0: 0} for topic in here})
    assert {key for (key,) in query(databases, totals, SinkRole.OWNER)} == {KEY, OTHER}


def test_a_stored_answer_that_names_the_key_is_gone_and_its_request_is_not_repeated(databases: Settings) -> None:
    answers = {
        "mine": json.dumps({"id": "x", "order": {"order_id": KEY, "note": STORY}}),
        "theirs": json.dumps({"order_id": OTHER}),
        "no jsonb": json.dumps("\0"),
        "empty": "",
    }
    insert = "INSERT INTO idempotency_keys VALUES ('default', 'POST /orders', %s, 'h', 201, %s, now() + '1 day')"
    for one in answers.items():
        query(databases, insert, SourceRole.APP, one)
    assert erase.erase(databases, subject(databases))["stored answers"] == 1
    stored = dict(query(databases, "SELECT key, (status, body) FROM idempotency_keys ORDER BY key"))
    assert stored["mine"].startswith("(410,")
    assert STORY not in stored["mine"]
    assert stored["theirs"].startswith("(201,")
    assert found(databases) == {}


def test_what_cannot_be_a_key_is_refused_and_a_key_is_found_in_any_spelling(databases: Settings) -> None:
    for aggregate, key, code in (("customer", KEY, "event-undeclared"), ("order", "42", "key-invalid")):
        with raises(code):
            subject(databases, key, aggregate)
    key = "ABCDEF00-0000-4000-8000-000000000000"
    assert subject(databases, key).key == key.lower()


def test_a_letter_shows_what_is_not_personal(databases: Settings) -> None:
    query(databases, "ALTER TABLE orders ADD CHECK (reason IS NULL)", SinkRole.OWNER)
    with pytest.raises(Failure) as failed:
        apply(databases, cancelled(KEY, 1, STORY))
    assert STORY not in str(failed.value)
    apply(databases, cancelled(KEY, 2, STORY * 10))
    listed = run(databases, "dead-letters", "list") + run(databases, "dead-letters", "list", "--json")
    [(identity,)] = query(databases, "SELECT identity FROM dead_letters", SinkRole.OWNER)
    shown = run(databases, "dead-letters", "show", identity)
    assert listed.count("reason") >= 2
    assert STORY not in listed + shown
    assert KEY in shown


# Messages ----------------------------------------------------------------------------------------------------------

MARKER = '5f0c"a\n2-b1'
PERSONAL = {"name": {"type": "string", "x-personal": True}, "note": {"type": "string"}}
REFUSING = """
-- [refuse]
INSERT INTO rejections SELECT event_id, 'unwelcome', format('as %%s', note) FROM new_events;
-- [apply]
SELECT 1;
"""


def seen(settings: Settings, folder: Path, projection: str) -> Seen:
    create_tables(settings)
    known = Events(folder / "events").aggregate("order", TOML, placed_v1=payload(PERSONAL)).load()
    return Seen(settings, folder, known, ["order"], projection=projection)


def named(name: str) -> Record:
    return record("placed", {"id": "a", "number": 1, "name": name, "note": "late"})


@pytest.mark.parametrize("type_", ["int", "uuid", "timestamptz", "jsonb", "numeric", "boolean"])
def test_a_failed_cast_repeats_no_value(databases: Settings, tmp_path: Path, type_: str) -> None:
    casting = seen(databases, tmp_path, f"SELECT name::{type_} FROM new_events")
    with pytest.raises(Failure) as failed:
        casting.apply("shop.order", named(MARKER))
    assert failed.value.code == "database-refused"
    assert not any(part in str(failed.value) for part in ("5f0c", "2-b1")), failed.value
    with pytest.raises(psycopg2.Error) as other:
        query(databases, 'SELECT "no column"', SinkRole.OWNER)
    assert reason_of(other.value) == 'column "no column" does not exist', "other messages are whole"


def test_the_detail_of_a_refusal_is_hidden_also_if_only_an_older_version_is_personal(
    databases: Settings, tmp_path: Path
) -> None:
    refusing = seen(databases, tmp_path, REFUSING)
    assert refusing.apply("shop.order", named("5f0c")).rejected == 1
    assert refusing.letters("reason", "detail") == [("unwelcome", "not shown: the sink takes personal data")]
    events = Events(tmp_path / "events").aggregate("order", TOML, placed_v2=payload({"note": {"type": "string"}}))
    events.write("order/upcast.py", "def placed_v1(payload):\n    raise ValueError(payload['name'])\n")
    refusing.deploy("order", known=events.load())
    assert refusing.spec.is_personal
    assert refusing.apply("shop.order", named("5f0c")).dead == 1
    assert ("placed_v1: ValueError",) in refusing.letters("detail")
