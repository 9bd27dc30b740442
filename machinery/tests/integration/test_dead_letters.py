"""Dead letters against a real Postgres: found, replayed each once or given up for good, beside a sink and across
deployments. The attack tries all orders, on a model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from psycopg2 import extensions

from outbox.audit import sinks
from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.decoding.records import Record
from outbox.sink.remembering import fence
from outbox.sink.repair import replay
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.writer import Counts
from outbox_lab.testing import command
from outbox_lab.testing.failures import raises
from tests.seen import ORDERED, Seen, create_tables
from tests.support.declared import TOML, Events, payload
from tests.support.declared_sinks import record
from tests.support.kept_rows import cursor_of, has_waiting
from tests.support.made_events import MAIN, STRATEGIES, TOPIC, TOPIC_ID, Event, batch, dead_record, nth_key, sums, uuid7
from tests.support.record_corpus import unread
from tests.support.sink_driver import Database, open_sink, projections_in, replayed, sink_on, spec_with

RANDOM = Random(5)  # noqa: S311


def kilos(quantity: int = 7, version: int = 1, number: int = 1) -> Event:
    """An event whose id is new. Its total afterwards is right if it is the item's only one."""
    return Event(uuid7(RANDOM), nth_key(number), quantity, version, total_after=quantity)


def litres(event: Event) -> Event:
    """The event in another unit, which the projection refuses once the item has the first."""
    return replace(event, unit="LTR")


def set_aside(settings: Settings, *events: Event, name: str = "dedup") -> None:
    """Let a sink come by a record of each of these events, from offset 0 on, that it cannot read."""
    with open_sink(settings, name) as sink:
        sink.apply(batch([], dead=[unread(event, offset) for offset, event in enumerate(events)]))


def test_large_letters_are_few_in_a_transaction(
    databases: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [kilos(number=number) for number in range(4)]
    set_aside(databases, *some)
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        (size_bytes, *_) = {chosen.size_bytes for chosen in Selection(sink="dedup").choose(connection)}
    monkeypatch.setattr(replay, "CHUNK_BYTES", 2 * size_bytes + 10)
    assert replayed(databases, MAIN) == Replayed(applied=4)
    transactions = database.query("SELECT count(*) FROM dead_letters GROUP BY last_seen_at")
    assert transactions == [(2,), (2,)]


def test_killed_between_two_chunks_a_replay_goes_on_where_it_was(
    databases: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "CHUNK", 2)
    some = [kilos(3**number, version=number + 1) for number in range(5)]
    set_aside(databases, *some)
    once, taken = fence.lock, iter(range(2))

    def dies(cursor: extensions.cursor, name: str) -> None:
        if next(taken, None) is None:
            raise KeyboardInterrupt
        once(cursor, name)

    with monkeypatch.context() as patched:
        patched.setattr(fence, "lock", dies)
        with pytest.raises(KeyboardInterrupt):
            replayed(databases, MAIN)
    assert database.totals() == sums(some[:4])
    assert replayed(databases, MAIN) == Replayed(applied=1)
    assert database.totals() == sums(some)


def test_a_replay_waits_for_the_transaction_of_the_sink_and_leaves_out_what_that_has_applied(
    databases: Settings, database: Database
) -> None:
    late, applied = kilos(), kilos(number=2)
    set_aside(databases, late, applied)
    with ThreadPoolExecutor() as pool:
        with cursor_of(databases) as cursor:
            fence.lock(cursor, "dedup")
            running = pool.submit(replayed, databases, MAIN)
            wait_for("the replay to wait", lambda: has_waiting(databases), timeout_s=20)
            assert {*database.statuses().values()} == {"open"}
            cursor.execute("UPDATE dead_letters SET status = 'replayed' WHERE identity = %s", [applied.event_id])
        assert running.result() == Replayed(applied=1)
    assert database.totals() == sums([late])


def test_an_event_that_takes_the_letter_of_a_discarded_record_leaves_that_acknowledged(
    databases: Settings, database: Database
) -> None:
    def acknowledged() -> frozenset[str]:
        """The identities of the records that `outbox check` no longer reports."""
        with cursor_of(databases, SinkRole.AUDITOR) as cursor:
            return sinks.acknowledged(cursor, ["dedup"])

    event = litres(kilos(7, version=2))
    with open_sink(databases) as sink:
        sink.apply(batch([kilos(5)], dead=[dead_record(1, event.event_id)]))
        assert database.discard() == 1
        assert acknowledged() == {event.event_id}
        assert sink.apply(batch([event], start=2)).rejected == 1
        assert acknowledged() == set(), "its event is set aside"
    query(databases, SinkRole.WRITER, "UPDATE stock SET unit = 'LTR'")  # now the event fits
    assert replayed(databases, MAIN) == Replayed(applied=1)
    assert acknowledged() == {event.event_id}


@pytest.mark.parametrize("whose", ["gen_random_uuid()", "event_id"])
def test_a_projection_may_only_refuse_new_events(
    databases: Settings, database: Database, tmp_path: Path, whose: str
) -> None:
    """An event that is applied already must not become a dead letter, or its replay would apply it twice."""
    wrong = projections_in(
        tmp_path,
        f"-- [refuse]\nINSERT INTO rejections SELECT {whose}, 'no', 'no' FROM outbox_batch\n-- [apply]\nSELECT 1",
    )
    first, late = kilos(5, number=2), kilos()
    with open_sink(databases) as sink:
        sink.apply(batch([first]))
        sink.apply(batch([], start=1, dead=[unread(first, 1), unread(late, 2)]))
    with raises("projection-unusable", "dedup"):
        replayed(databases, spec_with(projections=wrong))
    assert database.statuses() == {first.event_id: "open", late.event_id: "open"}
    assert database.processed() == 1


class TestCommand:
    @pytest.fixture
    def letters(self, databases: Settings) -> Sequence[Event]:
        """One unread, one refused, one without any id, and the first of them in a second sink too."""
        late, refused = kilos(9, number=2), litres(kilos(7, version=2))
        nameless = dead_record(3, value=b"\xff", key=refused.key.encode(), reason="missing id")
        with open_sink(databases) as sink:
            sink.apply(batch([kilos(5)], dead=[unread(late, 1)]))
            sink.apply(batch([refused], start=2))
            sink.apply(batch([], start=3, dead=[nameless]))
        set_aside(databases, late, name="naive")
        return [late, refused]

    @staticmethod
    def run(settings: Settings, *arguments: str, status: int = 0) -> str:
        done = command.outbox("dead-letters", *arguments, home=settings.home, **settings.as_env())
        assert done.returncode == status, done.stderr
        assert len(done.stderr.splitlines()) == (1 if status == 1 else 0) or status == 2
        return done.stdout if status == 0 else done.stderr

    def test_list_and_show(self, databases: Settings, letters: Sequence[Event]) -> None:
        late, refused = letters

        def found(*arguments: str) -> list[tuple[str, str]]:
            """Sink and reason of each letter that is listed."""
            lines = [json.loads(line) for line in self.run(databases, "list", "--json", *arguments).splitlines()]
            return [(line["sink"], line["reason"]) for line in lines]

        unknown = "unknown schema version"
        dedups = [("dedup", unknown), ("dedup", "unit mismatch"), ("dedup", "missing id")]
        assert found() == found("--status", "all") == [*dedups, ("naive", unknown)]
        assert found("--sink", "dedup") == dedups
        assert found("--reason", "missing id") == dedups[2:]
        assert found(late.event_id.upper(), "--sink", "naive") == [("naive", unknown)]
        assert found("--key", refused.key) == dedups[1:]
        assert found("--status", "discarded") == []
        assert "dedup, naive" in self.run(databases, "show", late.event_id, status=1)
        assert "there is no dead letter x" in self.run(databases, "show", "x", status=1)
        shown = json.loads(self.run(databases, "show", late.event_id, "--sink", "dedup"))
        assert json.loads(shown["value"])["quantity"] == late.quantity
        assert (shown["key"], shown["topic"], shown["offset"]) == (late.key, TOPIC, 1)
        assert {"key": "id", "value": late.event_id} in shown["headers"]

    def test_key_of_a_record_controls_no_terminal(self, databases: Settings) -> None:
        letter = dead_record(0, value=b"{}", key=b"\x1b]0;title\x07\nstatus  discarded", reason="missing id")
        with open_sink(databases) as sink:
            sink.apply(batch([], dead=[letter]))
        identity = json.loads(self.run(databases, "list", "--json"))["identity"]
        (line,) = [line for line in self.run(databases, "show", identity).splitlines() if "title" in line]
        assert line.endswith(r'"\u001b]0;title\u0007\nstatus  discarded",')

    def test_replay_and_discard(self, databases: Settings, database: Database, letters: Sequence[Event]) -> None:
        late, refused = letters
        mine, because = ("--sink", "dedup"), ("--because", "looked at")
        for words in (["replay"], ["discard", *because]):
            assert "--all" in self.run(databases, *words, status=2)
        assert "'--because'" in self.run(databases, "discard", *mine, status=2)
        told = self.run(databases, "replay", *mine, "--reason", "unknown schema version")
        assert told == "sink dedup: replayed 1 (1 applied, 0 were applied already), 0 rejected again\n"
        assert "2 dead letters stay open" in self.run(databases, "replay", *mine, status=1)
        assert self.run(databases, "discard", *mine, *because) == "sink dedup: discarded 2\n"
        assert self.run(databases, "replay", *mine) == "no dead letters to replay\n"
        assert set(database.statuses().values()) == {"replayed", "discarded"}
        shown = json.loads(self.run(databases, "show", refused.event_id, *mine))
        assert (shown["status"], shown["resolution"]) == ("discarded", "looked at")
        assert set(Database(databases, "naive").statuses().values()) == {"open"}
        assert database.totals()[late.key] == late.quantity

    def test_letters_of_a_sink_that_is_gone_stay(self, databases: Settings, database: Database) -> None:
        gone, late = kilos(), kilos(number=2)
        set_aside(databases, gone)
        query(databases, SinkRole.WRITER, "UPDATE dead_letters SET sink = 'gone'")
        set_aside(databases, late)
        assert "gone" in self.run(databases, "replay", "--sink", "gone", status=1)
        self.run(databases, "replay", "--all")
        assert database.statuses() == {late.event_id: "replayed"}
        assert Database(databases, "gone").statuses() == {gone.event_id: "open"}


# Many letters: they come by the thousand in one transaction, and statistics are those of before it -----------------

LETTERS = 100_000
# In turn: an open one of an event, one of a record that was invalid, a resolved one, and a discarded one.
FILL = """
INSERT INTO dead_letters (sink, identity, topic, topic_id, partition, "offset", key, is_event, version, value,
                          event_id, status, reason, detail)
SELECT %(sink)s, id, %(topic)s, %(topic_id)s, 0, number, convert_to('key-' || number, 'UTF8'),
       number %% 4 <> 1, number, 'bad', id,
       (ARRAY['open', 'open', 'replayed', 'discarded'])[number %% 4 + 1], 'unwelcome', 'as yet'
  FROM (SELECT number, uuidv7() AS id FROM generate_series(%(first)s::int, %(last)s::int) AS number) AS numbers
"""
LETTER = """
INSERT INTO dead_letters (sink, identity, topic, topic_id, partition, "offset", is_event, event_id, status, reason,
                          detail)
VALUES (%(sink)s, %(id)s, %(topic)s, %(topic_id)s, 1, 0, true, %(id)s, %(status)s, 'unwelcome', 'as yet')
"""
BUFFERS_READ = """
SELECT heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit FROM pg_statio_user_tables
 WHERE relname = 'dead_letters'
"""


def buffers(connection: extensions.connection, settings: Settings) -> int:
    """How many buffers of dead_letters were read until now."""
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
    [(count,)] = query(settings, SinkRole.WRITER, BUFFERS_READ)
    return int(count)


@pytest.mark.parametrize(("analyzed", "count"), [(0, 100), (10, 1), (LETTERS, 1), (LETTERS, 100)])
@pytest.mark.parametrize("by", ["dedup", "offsets"])
def test_letters_of_others_are_not_read_whatever_statistics_say(
    databases: Settings, tmp_path: Path, by: str, analyzed: int, count: int
) -> None:
    create_tables(databases)
    some = [Event(uuid7(RANDOM), nth_key(number + 1), 1, 1) for number in range(count)]
    first, late, discarded, replayed = (
        Event(uuid7(RANDOM), nth_key(key), 1, version) for key, version in [(0, 1), (0, 2), (3001, 1), (3002, 1)]
    )
    names = {"sink": by, "topic": TOPIC, "topic_id": TOPIC_ID}
    with cursor_of(databases, SinkRole.OWNER) as cursor:
        cursor.execute("ALTER TABLE dead_letters SET (autovacuum_enabled = off)")
        cursor.execute(FILL, {**names, "first": 1, "last": analyzed})
        cursor.execute("ANALYZE dead_letters")
        cursor.execute(FILL, {**names, "first": analyzed + 1, "last": LETTERS})
        cursor.execute("INSERT INTO unwelcome VALUES (%s)", [first.event_id])
        for event, status in ((discarded, "discarded"), (replayed, "replayed")):
            cursor.execute(LETTER, {**names, "id": event.event_id, "status": status})
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        sink = sink_on(connection, STRATEGIES[by], projections_in(tmp_path, ORDERED, "seen"))
        assert sink.apply(batch([first])) == Counts(rows=1, rejected=1)
        before = buffers(connection, databases)
        counts = sink.apply(batch([*some, late, discarded, replayed], start=1))
        read = buffers(connection, databases) - before
    assert counts == Counts(rows=count + 3, applied=count, duplicates=2, rejected=1)
    assert read < 21 * count + 150


# Across deployments --------------------------------------------------------------------------------------------------

ORDER = "shop.order"
QUANTITY = {"quantity": {"type": "integer", "minimum": 1, "maximum": 99}}


@pytest.fixture
def events(tmp_path: Path) -> Events:
    """The declared events."""
    schemas = {"placed_v1": payload(QUANTITY, (*QUANTITY,)), "cancelled_v1": payload()}
    return Events(tmp_path / "events").aggregate("order", TOML, **schemas)


@pytest.fixture
def seen(databases: Settings, tmp_path: Path, events: Events) -> Seen:
    """A sink of one event."""
    create_tables(databases)
    return Seen(databases, tmp_path, events.load(), ["order.placed"])


@pytest.fixture
def ordered(seen: Seen) -> Seen:
    """The sink, whose projection needs order."""
    return Seen(seen.settings, seen.folder, seen.known, seen.names, projection=ORDERED)


def placed(number: int = 1, **changes: Any) -> Record:
    return record("placed", {"id": "a", "number": number, "quantity": 2} | changes)


def test_a_deprecated_event_is_applied(seen: Seen, events: Events) -> None:
    seen.deploy("order", known=events.aggregate("order", paid_v1=payload(deprecated=True)).load())
    assert seen.apply(ORDER, record("paid", {"id": "a", "number": 1})) == Counts(rows=1, applied=1)


def test_a_refused_start_stores_nothing_of_its_job(seen: Seen, events: Events) -> None:
    seen.apply(ORDER, placed())
    known = events.aggregate("order", paid_v1=payload()).load()
    seen.deploy("order.placed", "order.paid", known=known, is_decided=False)
    with seen.running() as writer, raises("topic-recreated"):
        writer.positions(ORDER, "another id")
    seen.deploy("order.placed", is_decided=False)
    assert seen.apply(ORDER, placed(2, id="b")) == Counts(rows=1, applied=1)


def test_an_event_of_an_older_version_is_upcast_when_its_letter_is_replayed(seen: Seen, events: Events) -> None:
    second = payload(QUANTITY | {"unit": {"type": "string"}}, (*QUANTITY, "unit"))
    events.write("order/upcast.py", "def placed_v1(payload):\n    raise KeyError('x')\n")
    seen.deploy(known=events.aggregate("order", placed_v2=second).load())
    assert seen.apply(ORDER, placed()) == Counts(dead=1)
    assert seen.letters("status", "reason") == [("open", "upcast failed")]
    events.write("order/upcast.py", 'def placed_v1(payload):\n    return {**payload, "unit": "PCE"}\n')
    seen.deploy(known=events.load())
    assert seen.replay(reason="upcast failed") == Replayed(applied=1)
    assert seen.events("unit", "quantity") == [("PCE", 2)]


class TestReplayBesideASink:
    """A replay also applies the events that the sink parks while it runs, after those that were chosen."""

    @pytest.fixture
    def unread(self, ordered: Seen) -> Seen:
        """The sink has an unreadable event of the key a, and one behind it."""
        ordered.apply(ORDER, placed(1, quantity="one"), placed(2))
        return ordered

    @staticmethod
    def run(seen: Seen, *meanwhile: Record) -> Replayed:
        """Replay the unreadable event with what is parked behind it. When they are chosen, the sink applies others."""
        with closing(connect(seen.settings, SinkRole.WRITER)) as connection:
            chosen = Selection(reason="schema violation").choose(connection, with_parked=True)
            seen.apply(ORDER, *meanwhile)
            known = {seen.spec.name: seen.spec}
            (done,) = replay.replay(connection, known, chosen, applier_of=PostgresApplier).values()
            return done

    @staticmethod
    def correct(seen: Seen) -> None:
        """Make the event readable."""
        value = [placed().value]
        query(seen.settings, SinkRole.OWNER, "UPDATE dead_letters SET value = %s WHERE NOT is_event", value)

    @pytest.mark.parametrize("count", [1, 5])
    def test_what_is_parked_meanwhile_follows(self, unread: Seen, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        monkeypatch.setattr(replay, "CHUNK_BYTES", 700)  # of some two letters
        self.correct(unread)
        more = [placed(3 + number) for number in range(count)]
        assert self.run(unread, *more, placed(1, id="b")) == Replayed(applied=2 + count)
        assert unread.events("id", "number") == [("b", 1), *(("a", 1 + number) for number in range(2 + count))]
        unread.apply(ORDER, placed(3 + count))
        assert unread.events("number")[-1] == (3 + count,), "nothing blocks the key any more"

    def test_what_waits_for_a_letter_that_stays_open_stays(self, unread: Seen) -> None:
        assert self.run(unread, placed(3)) == Replayed(rejected=3), "each is tried once"
        assert unread.letters("reason") == [("schema violation",), ("parked",), ("parked",)]
