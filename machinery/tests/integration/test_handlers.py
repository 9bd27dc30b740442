"""Handlers: each event once in effect, whatever the function does, and the order of a key while one of it waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import psycopg2
import pytest
from psycopg2 import extensions
from psycopg2.extras import RealDictCursor

from outbox.base.database import connect, hang_up, query
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import in_thread, wait_for
from outbox.handlers import AsyncConnection, handler
from outbox.handlers import Event as Handled
from outbox.sink.applying.handlers.handler import Function
from outbox.sink.applying.handlers.target import HandlerTarget
from outbox.sink.applying.handlers.writer import HANDLER_FAILED, HandlerWriter
from outbox.sink.remembering import positions
from outbox.sink.repair.replay import Selection
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Counts
from outbox_lab.testing.failures import raises
from tests import items
from tests.support.kept_rows import has_waiting
from tests.support.made_events import MAIN, TOPIC, Event, batch, dead_record, nth_key, uuid7
from tests.support.sink_driver import Database, driving, replayed

WRITER = HandlerWriter.__module__
TIMEOUT_S = 60.0
RANDOM = Random(47)  # noqa: S311
EVENTS = [Event(uuid7(RANDOM), nth_key(number % 3), 1 + number, number // 3 + 1) for number in range(12)]
ALL_VERSIONS = {nth_key(number): [1, 2, 3, 4] for number in range(3)}  # by key, if all of EVENTS are handled in order
TABLES = """
CREATE TABLE handled (line bigserial PRIMARY KEY, event_id uuid, key text, version bigint);
GRANT SELECT, INSERT ON handled TO {writer};
GRANT USAGE ON SEQUENCE handled_line_seq TO {writer};
"""


@dataclass
class Subject:
    """A handler's sink on a database. Its function writes a line for each event, unless it is to fail for one."""

    settings: Settings
    failing: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    error: Callable[[extensions.connection], object] | None = None

    def __post_init__(self) -> None:
        self.database = Database(self.settings, "receipts")

    def write(self, event: Handled, connection: extensions.connection) -> None:
        self.calls.append(event.id)
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO handled (event_id, key, version) VALUES (%s, %s, %s)", [event.id, event.key, event.version]
            )
        if event.id in self.failing:
            if self.error is not None:
                self.error(connection)
            raise RuntimeError("not today")

    async def write_async(self, event: Handled, connection: AsyncConnection) -> None:
        """Write as an async function, whose calls take turns."""
        await asyncio.sleep(0.001)
        await connection.run(partial(self.write, event))

    def spec(self, function: Function | None = None, workers: int = 1) -> SinkSpec:
        declared = handler(items.AGGREGATE, name="receipts", attempts=3, workers=workers)(function or self.write)
        job = replace(MAIN.job, name="receipts", target=HandlerTarget(declared), strategy="dedup")
        return replace(MAIN, name="receipts", job=job, target=HandlerTarget(declared))

    @contextmanager
    def handling(self, function: Function | None = None, workers: int = 1) -> Iterator[HandlerWriter]:
        """A running handler, of this function or of its own."""
        with driving(self.settings, self.spec(function, workers)) as made:
            assert isinstance(made, HandlerWriter)
            yield made
            for other in made.connections[1:]:
                other.close()

    def handle(self, events: Sequence[Event], function: Function | None = None, workers: int = 1) -> Counts:
        """Handle one batch."""
        with self.handling(function, workers) as writer:
            return writer.apply(batch(events, 0))

    def replay(self, *identities: str, at_once: int = 1000) -> None:
        if identities:
            wanted = Selection(identities=identities)
            replayed(self.settings, self.spec(), wanted, with_parked=False, at_once=at_once)

    def retry(self, writer: HandlerWriter, count: int = 100) -> None:
        """Replay what is due, as a plain sink does between its batches."""
        letters, at_once = writer.due(count)
        self.replay(*letters, at_once=at_once)

    def accept_recreated(self) -> None:
        """Read the topic `topic-2` of the same name from its beginning."""
        connected = closing(connect(self.settings, SinkRole.WRITER))
        with connected as connection, connection, connection.cursor() as cursor:
            assert positions.accept_recreated(cursor, "receipts", TOPIC, "topic-2")

    def lines(self) -> list[str]:
        return [str(event_id) for (event_id,) in self.database.query("SELECT event_id FROM handled ORDER BY line")]

    def versions(self) -> dict[str, list[int]]:
        """By key the versions in the order in which they were handled."""
        found: dict[str, list[int]] = {}
        for key, version in self.database.query("SELECT key, version FROM handled ORDER BY line"):
            found.setdefault(str(key), []).append(int(str(version)))
        return found


@pytest.fixture
def subject(databases: Settings) -> Subject:
    query(databases, SinkRole.OWNER, TABLES.format(writer=databases.role_name(SinkRole.WRITER)))
    return Subject(databases)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is due at once."""
    for name in ("LOOK_EVERY_S", "FIRST_DELAY_S", "MAX_DELAY_S", "LOOK_AT_PARKED_EVERY_S"):
        monkeypatch.setattr(f"{WRITER}.{name}", 0)


@pytest.fixture
def writer(subject: Subject) -> Iterator[HandlerWriter]:
    with subject.handling() as made:
        yield made


def test_each_event_is_handled_once_in_the_order_of_the_topic(subject: Subject) -> None:
    seen: list[Handled] = []

    def write(event: Handled, connection: extensions.connection) -> None:
        connection.cursor_factory = RealDictCursor  # it may choose another kind of cursor
        seen.append(event)
        subject.write(event, connection)

    with subject.handling(write) as writer:
        writer.apply(batch([*EVENTS[:6], *EVENTS[2:4]], 0))
        assert writer.due(1).letters == []
        writer.apply(batch(EVENTS[4:], 8))
    assert subject.lines() == subject.calls == [one.event_id for one in EVENTS]
    for event, sent in zip(seen, EVENTS, strict=True):
        assert (event.id, event.type, event.key, event.version) == (sent.event_id, sent.name, sent.key, sent.version)
        assert {**event.payload, "occurred_at": 0} == {**sent.payload(), "occurred_at": 0}


@pytest.mark.usefixtures("impatient")
def test_it_is_tried_again_until_it_succeeds_or_is_given_up(
    subject: Subject, writer: HandlerWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing, failing = EVENTS[3].event_id, EVENTS[1].event_id
    subject.failing = {passing, failing}
    writer.apply(batch(EVENTS, 0))
    with monkeypatch.context() as patch:
        patch.setattr(f"{WRITER}.FIRST_DELAY_S", 60)
        patch.setattr(f"{WRITER}.MAX_DELAY_S", 60)
        assert writer.due(100).letters == [], "not before its delay"
    subject.retry(writer)
    assert subject.versions()[nth_key(0)] == [1]
    subject.failing = {failing}
    for _ in range(6):
        subject.retry(writer)
    assert [subject.calls.count(one) for one in (passing, failing)] == [3, 3]
    assert subject.versions() == {nth_key(0): [1, 2, 3, 4], nth_key(2): [1, 2, 3, 4]}
    assert subject.database.statuses()[failing] == "open"


@pytest.mark.usefixtures("impatient")
def test_after_a_discard_the_later_events_of_the_key_go_on(subject: Subject, writer: HandlerWriter) -> None:
    subject.failing = {EVENTS[0].event_id}
    writer.apply(batch(EVENTS, 0))
    subject.retry(writer)
    assert nth_key(0) not in subject.versions(), "they wait for the first"
    assert subject.database.discard(Selection(identities=[EVENTS[0].event_id])) == 1
    subject.retry(writer)
    assert subject.versions()[nth_key(0)] == [2, 3, 4]


@pytest.mark.usefixtures("impatient")
def test_what_waits_for_nothing_has_its_turn_while_others_are_due(subject: Subject, writer: HandlerWriter) -> None:
    subject.failing = {EVENTS[0].event_id, EVENTS[1].event_id}
    writer.apply(batch(EVENTS[:4], 0))
    assert subject.database.discard(Selection(key=nth_key(0), reason=HANDLER_FAILED)) == 1
    assert writer.due(5).letters == [EVENTS[3].event_id], "and not the second event, which is due at once"


@pytest.mark.usefixtures("impatient")
def test_an_event_behind_a_record_of_a_former_topic_waits_and_holds_up_no_other(subject: Subject) -> None:
    behind, failing = EVENTS[0], EVENTS[1]
    with subject.handling() as writer:
        writer.apply(batch(EVENTS[2:3], 0, dead=[dead_record(1, key=behind.key.encode())]))
    subject.accept_recreated()
    subject.failing = {failing.event_id}
    with subject.handling() as writer:
        writer.apply(replace(batch([behind, failing], 0), topic_id="topic-2"))
        assert writer.due(5).letters == [failing.event_id]
        assert subject.database.discard(Selection(reason="not JSON")) == 1
        assert writer.due(5).letters == [behind.event_id]


@pytest.mark.usefixtures("impatient")
def test_an_event_of_a_former_topic_does_not_wait_for_a_record_of_the_present_one(subject: Subject) -> None:
    first, behind = EVENTS[0], EVENTS[3]
    subject.failing = {first.event_id}
    with subject.handling() as writer:
        writer.apply(batch([EVENTS[1], first, behind], 0))
    subject.accept_recreated()
    with subject.handling() as writer:
        writer.apply(replace(batch([], 0, dead=[dead_record(0, key=first.key.encode())]), topic_id="topic-2"))
        assert subject.database.discard(Selection(identities=[first.event_id])) == 1
        subject.retry(writer)
    assert subject.lines() == [EVENTS[1].event_id, behind.event_id]


def _divide(connection: extensions.connection) -> None:
    connection.cursor().execute("SELECT 1 / 0")


def _caught(connection: extensions.connection) -> None:
    with pytest.raises(psycopg2.Error):
        _divide(connection)


class _MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _raise(error: BaseException) -> Callable[[extensions.connection], object]:
    def raises_it(_: extensions.connection) -> None:
        raise error

    return raises_it


def _and_goes_on(end: Callable[[extensions.connection], object]) -> Callable[[extensions.connection], object]:
    def ends(connection: extensions.connection) -> None:
        with suppress(psycopg2.Error):
            end(connection)
        connection.cursor().execute("SELECT 1")

    return ends


ENDS: dict[str, tuple[Callable[[extensions.connection], object], str]] = {
    "commit": (extensions.connection.commit, "handler-wrong"),
    "ROLLBACK": (lambda connection: connection.cursor().execute("ROLLBACK"), "handler-wrong"),
    "commit, and goes on": (_and_goes_on(extensions.connection.commit), "handler-wrong"),
    "rollback, and goes on": (_and_goes_on(extensions.connection.rollback), "handler-wrong"),
    "close": (extensions.connection.close, "handler-wrong"),
    "lost": (hang_up, "database-connection-lost"),
    "lost, and goes on": (_and_goes_on(hang_up), "database-connection-lost"),
}


@pytest.mark.parametrize(("end", "code"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("fails", [False, True])
def test_a_transaction_that_ends_in_a_call_stops_the_handler_and_loses_nothing(
    subject: Subject, end: Callable[[extensions.connection], object], code: str, fails: bool
) -> None:
    def ends(event: Handled, connection: extensions.connection) -> None:
        subject.write(event, connection)
        if event.id == EVENTS[1].event_id:
            end(connection)
            if fails:
                raise RuntimeError("not today")

    with raises(code, EVENTS[1].event_id if code == "database-connection-lost" else "receipts"):
        subject.handle(EVENTS[:3], ends)
    assert subject.lines() == []
    subject.handle(EVENTS[:3])
    assert subject.lines() == [one.event_id for one in EVENTS[:3]]


def test_an_async_function_is_awaited(subject: Subject) -> None:
    async def write(event: Handled, connection: AsyncConnection) -> None:
        thread = await asyncio.to_thread(threading.current_thread)
        assert thread.daemon, "it would keep the process from its end"
        await connection.run(partial(subject.write, event))
        assert await connection.execute("SELECT key FROM handled WHERE event_id = %s", [event.id]) == [(event.key,)]
        kept.append(connection)

    kept: list[AsyncConnection] = []
    subject.failing = {EVENTS[0].event_id}
    subject.handle(EVENTS[:3], write)
    with pytest.raises(RuntimeError, match="after the end of the call"):
        asyncio.run(kept[0].execute("SELECT 1"))
    assert subject.lines() == [one.event_id for one in EVENTS[1:3]]


def test_versions_that_come_in_another_order_are_sorted_and_none_is_lost(subject: Subject) -> None:
    first, second, third = (Event(uuid7(RANDOM), nth_key(0), 1, version) for version in (1, 2, 3))
    subject.failing = {second.event_id}
    subject.handle([third, second, first])
    assert subject.lines() == [first.event_id]
    assert subject.database.dead_letters() == {second.event_id: HANDLER_FAILED, third.event_id: "parked"}
    subject.failing = set()
    subject.replay(second.event_id)
    assert subject.lines() == [one.event_id for one in (first, second, third)]


@pytest.mark.usefixtures("impatient")
def test_few_events_are_due_at_once(subject: Subject, writer: HandlerWriter) -> None:
    some = [Event(uuid7(RANDOM), nth_key(number), 1, 1) for number in range(5)]
    subject.failing = {one.event_id for one in some}
    writer.apply(batch(some, 0))
    found = [writer.due(2) for _ in range(3)]
    assert [(len(letters), at_once) for letters, at_once in found] == [(2, 2), (2, 2), (1, 2)]
    assert len({letter for letters, _ in found for letter in letters}) == 5, "each has its turn"
    alone = [writer.due(2) for _ in range(5)]
    assert [(len(letters), at_once) for letters, at_once in alone] == [(1, 1)] * 5, "no call has returned"
    assert len({letter for letters, _ in alone for letter in letters}) == 5


TRIGGER = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not today'; END $$;
CREATE CONSTRAINT TRIGGER refusing AFTER INSERT ON handled DEFERRABLE INITIALLY DEFERRED
   FOR EACH ROW WHEN (NEW.version = 2) EXECUTE FUNCTION refuse();
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_deferred_trigger_fails_for_the_event_alone(subject: Subject, workers: int) -> None:
    query(subject.settings, SinkRole.OWNER, TRIGGER)
    subject.handle(EVENTS[:4], workers=workers)
    assert sorted(subject.lines()) == sorted(one.event_id for one in EVENTS[:3])
    assert subject.database.dead_letters() == {EVENTS[3].event_id: HANDLER_FAILED}


def test_a_task_that_exits_does_not_end_the_loop_of_other_calls(subject: Subject) -> None:
    async def exits() -> None:
        raise SystemExit(3)

    async def write(event: Handled, connection: AsyncConnection) -> None:
        await subject.write_async(event, connection)
        if event.id == EVENTS[0].event_id:
            await asyncio.gather(exits())

    in_thread("apply", subject.handle, EVENTS[:3], write).result(TIMEOUT_S)
    assert subject.lines() == [one.event_id for one in EVENTS[1:3]]
    assert subject.database.dead_letters() == {EVENTS[0].event_id: HANDLER_FAILED}


def test_a_call_that_blocks_the_loop_does_not_make_events_of_others_fail(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{AsyncConnection.__module__}.BLOCKED_S", 0.2)
    begun, may_end = threading.Event(), threading.Event()

    async def blocks() -> None:
        begun.set()
        assert may_end.wait(TIMEOUT_S)

    with closing(connect(subject.settings, SinkRole.WRITER)) as connection:
        blocking = in_thread("blocking", AsyncConnection(connection).finish, blocks())
        assert begun.wait(TIMEOUT_S)
        with raises("event-loop-blocked"):
            subject.handle(EVENTS[:3], subject.write_async)
        may_end.set()
        blocking.result(TIMEOUT_S)
    assert (subject.calls, subject.database.dead_letters()) == ([], {})
    subject.handle(EVENTS[:3], subject.write_async)
    assert subject.lines() == [one.event_id for one in EVENTS[:3]]


@pytest.mark.parametrize("is_async", [False, True])
def test_workers_take_different_keys_at_once_and_a_key_in_order(subject: Subject, is_async: bool) -> None:
    together = threading.Barrier(3, timeout=TIMEOUT_S)

    def write(event: Handled, connection: extensions.connection) -> None:
        together.wait()  # which is broken if fewer call at a time
        subject.write(event, connection)

    async def write_async(event: Handled, connection: AsyncConnection) -> None:
        await asyncio.to_thread(together.wait)
        await connection.run(partial(subject.write, event))

    with subject.handling(write_async if is_async else write, workers=3) as writer:
        writer.apply(batch(EVENTS, 0))
        writer.apply(batch([*EVENTS, *EVENTS[:3]], 0))
    assert subject.versions() == ALL_VERSIONS
    assert subject.database.positions() == {0: 15}


def test_a_driver_that_takes_over_waits_for_what_a_worker_has_begun(subject: Subject) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def write(event: Handled, connection: extensions.connection) -> None:
        begun.set()
        assert may_end.wait(TIMEOUT_S)
        subject.write(event, connection)

    with subject.handling(write, workers=3) as old, raises("database-connection-lost"):
        applied = in_thread("old driver", old.apply, batch(EVENTS, 0))
        assert begun.wait(TIMEOUT_S)
        hang_up(old.connections[0])  # its fence is gone, and its workers do not know
        taking_over = in_thread("new driver", subject.handle, EVENTS)
        wait_for("the new driver to wait", lambda: has_waiting(subject.settings), timeout_s=TIMEOUT_S)
        may_end.set()
        taking_over.result()
        applied.result()
    assert subject.versions() == ALL_VERSIONS


def test_a_worker_that_begins_after_a_takeover_calls_nothing(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[str]()

    def taken_over(name: str, *call: Any) -> Any:
        query(subject.settings, SinkRole.OWNER, "UPDATE sinks SET epoch = epoch + 1")
        begun.append(name)
        return in_thread(name, *call)

    monkeypatch.setattr(f"{WRITER}.in_thread", taken_over)
    with subject.handling(workers=3) as writer, raises("sink-fenced"):
        writer.apply(batch(EVENTS, 0))
    assert len(begun) == 3
    assert subject.calls == []


@pytest.mark.parametrize("before", [pytest.param(0, id="of a rewind"), pytest.param(1, id="of another partition")])
@pytest.mark.usefixtures("impatient")
def test_records_that_come_before_a_call_that_never_returns_do_not_hide_it(subject: Subject, before: int) -> None:
    """Each start applies other records first, and as many as the batch of the call has."""
    poison = EVENTS[7]
    subject.failing, subject.error = {poison.event_id}, hang_up
    others = [Event(uuid7(RANDOM), nth_key(3), 1, 1 + number) for number in range(60)]
    starts, is_done = 0, False
    while not is_done:
        starts += 1
        assert starts < 10, "the handler never gets past the call"
        first = EVENTS[:6] if before == 0 else others[6 * starts - 6 : 6 * starts]
        with suppress(Failure), subject.handling() as writer:
            writer.apply(batch(first, 0 if before == 0 else 6 * starts - 6, partition=before))
            if before:
                writer.apply(batch(EVENTS[:6], 0))
            writer.apply(batch(EVENTS[6:], 6))
            for _ in EVENTS:
                subject.retry(writer)
            is_done = subject.database.retries(poison.event_id) == 2
    versions = subject.versions()
    versions.pop(nth_key(3), None)
    assert versions == {nth_key(0): [1, 2, 3, 4], nth_key(1): [1, 2], nth_key(2): [1, 2, 3, 4]}
    with subject.handling() as writer:
        assert subject.database.query("SELECT interruptions, unfinished FROM sinks") == [(0, {})]


def test_calls_for_a_topic_that_was_made_again_are_forgotten(subject: Subject) -> None:
    subject.failing, subject.error = {EVENTS[7].event_id}, hang_up
    with subject.handling() as writer, raises("database-connection-lost"):
        writer.apply(batch(EVENTS[:6], 0))
        writer.apply(batch(EVENTS[6:], 6))
    unfinished = "SELECT unfinished FROM sinks"
    assert subject.database.query(unfinished) == [({f"{TOPIC}/0": len(EVENTS)},)]
    subject.accept_recreated()
    assert subject.database.query(unfinished) == [({},)], "their offsets say nothing of the new topic"


def test_starts_that_have_called_nothing_are_no_interruptions(subject: Subject) -> None:
    def refused() -> extensions.connection:
        raise Failure("too many connections", "wait", code="database-unavailable")

    for _ in range(3):
        with subject.handling(workers=2) as writer, raises("database-unavailable"):
            writer.connect = refused
            writer.apply(batch(EVENTS, 0))
    subject.handle(EVENTS, workers=2)
    assert subject.database.dead_letters() == {}
    assert len(subject.lines()) == len(EVENTS)


def test_a_statement_that_outlives_its_call_changes_nothing_behind_it(subject: Subject) -> None:
    begun, may_write = threading.Event(), threading.Event()

    async def write(event: Handled, connection: AsyncConnection) -> None:
        def late(of: extensions.connection) -> None:
            begun.set()
            assert may_write.wait(TIMEOUT_S)
            subject.write(event, of)

        if event.id != EVENTS[0].event_id:
            await connection.run(partial(subject.write, event))
            return
        task = asyncio.ensure_future(connection.run(late))
        await asyncio.to_thread(begun.wait, TIMEOUT_S)
        task.cancel()  # as a timeout does
        threading.Timer(0.2, may_write.set).start()
        raise TimeoutError

    subject.handle(EVENTS[:3], write)
    assert subject.calls[0] == EVENTS[0].event_id
    assert subject.lines() == [one.event_id for one in EVENTS[1:3]]
    assert subject.database.dead_letters() == {EVENTS[0].event_id: HANDLER_FAILED}


@pytest.mark.parametrize(("seed", "workers", "is_async"), [(1, 1, False), (2, 1, True), (3, 3, False), (4, 3, True)])
@pytest.mark.usefixtures("impatient")
def test_whatever_fails_each_event_is_handled_once_or_has_a_letter(
    subject: Subject, seed: int, workers: int, is_async: bool
) -> None:
    """Batches, batches again, retries, replays and discards in any order, while the function fails at random, or loses
    its connection.
    """
    random, sent, discarded = Random(seed), 0, set[str]()  # noqa: S311
    events = [Event(uuid7(RANDOM), nth_key(number % 4), 1, 1 + number // 4) for number in range(100)]
    ids = [one.event_id for one in events]
    errors = [None, _divide, _caught, *map(_raise, (_MuteError(), SystemExit(3), asyncio.CancelledError())), hang_up]
    lost = 0

    def opened() -> list[str]:
        return [identity for identity, status in subject.database.statuses().items() if status == "open"]

    def some(of: list[str], most: int) -> list[str]:
        return random.sample(of, min(len(of), random.randint(1, most)))

    def operate(writer: HandlerWriter) -> None:
        nonlocal sent
        subject.failing = {one.event_id for one in events if random.random() < 0.25}
        subject.error = random.choice(errors)
        match random.randrange(8):
            case 0 if sent:
                begin = random.randrange(sent)
                writer.apply(batch(events[begin : begin + random.randint(1, sent - begin)], begin))
            case 1 | 2:
                subject.retry(writer, random.randint(1, 5))
            case 3 if letters := some(opened(), 5):
                subject.replay(*letters)
            case 4 if letters := some(opened(), 1):
                discarded.update(letters)
                subject.database.discard(Selection(identities=letters))
            case _:
                count = random.randint(1, 12)
                writer.apply(batch(events[sent : sent + count], sent))
                sent = min(len(events), sent + count)

    function = subject.write_async if is_async else subject.write
    while sent < len(events):
        with suppress(Failure), subject.handling(function, workers=workers) as writer:
            while sent < len(events):
                lost += 1
                operate(writer)
                lost -= 1
                dealt_with = [*subject.lines(), *opened(), *discarded]
                assert len(dealt_with) == len({*dealt_with})
                # Workers may have done their share of a batch in which another one has lost its connection.
                assert {*ids[:sent]} <= {*dealt_with} <= {*ids[: sent + 12]}
        handled = subject.lines()
        assert len(handled) == len({*handled})
        assert subject.database.applied() == len(handled) or workers > 1
        assert all(versions == sorted(versions) for versions in subject.versions().values())
    assert lost, "a connection was lost"
    subject.failing = set()
    subject.replay(*opened())
    assert {*subject.lines()} == {*ids} - discarded
