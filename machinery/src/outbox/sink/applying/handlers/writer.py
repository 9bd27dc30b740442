"""How handlers are called: each event in a savepoint of the transaction that applies, in the order of the topic.

With several workers the keys of a batch are dealt out, and each worker applies its keys in a transaction of its own,
with the ids of their events. The positions move when all have committed. If the process ends in between, the batch
comes again, and the ids say what is done: these events count as duplicates. A worker holds the sink's lock together
with the others, so another driver that takes the sink over waits for what a worker has begun, and a worker that begins
later finds another epoch.

A call that never returns ends with its connection or process. So the ends of a batch are stored before its calls, and
taken back together with the move of the positions. A start that finds such ends for the second time in a row calls the
function for nothing below them: it sets that aside, and calls for it one by one, counting before each call.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any, NamedTuple

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.heavy import extensions, extras, psycopg2
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import in_thread
from outbox.events.schema import Rejection
from outbox.sink.applying.calling import CallingApplier, NewEvent
from outbox.sink.applying.handlers.aio import AsyncConnection, LoopBlockedError
from outbox.sink.applying.handlers.handler import Event, Handler
from outbox.sink.applying.postgres.applier import MAY_BLOCK
from outbox.sink.applying.postgres.target import RENEWAL_S, PostgresWriter
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.records import Fetch
from outbox.sink.remembering import dead_letters, fence
from outbox.sink.spec import SinkSpec, first_line
from outbox.sink.writer import PARKED, Applied, Counts, Due

HANDLER_FAILED, NOT_CALLED = "handler failed", "handler not called yet"
INTERRUPTED, UNRETURNED = "calls before have not returned", "the last call has not returned"
INTERRUPTIONS_MAX = 2  # in a row; then no call is made that may be the cause
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0
LOOK_EVERY_S = 0.5  # at what waits for another attempt
LOOK_AT_PARKED_EVERY_S = 10.0
SAVEPOINT, RELEASE = "SAVEPOINT outbox_handler", "RELEASE SAVEPOINT outbox_handler"
UNDO = "ROLLBACK TO SAVEPOINT outbox_handler"
NEXT = f"{RELEASE}; {SAVEPOINT}"  # in one round trip, after a call that did well; one that failed leaves the savepoint
# A function that commits would commit the ids of events that it was not called for yet. So while functions are called,
# the transaction holds two equal rows, which no commit allows.
GUARD = "CREATE TEMPORARY TABLE outbox_uncommitted (number int UNIQUE DEFERRABLE INITIALLY DEFERRED)"
LOCK, UNLOCK = "INSERT INTO pg_temp.outbox_uncommitted VALUES (1), (1)", "DELETE FROM pg_temp.outbox_uncommitted"
CHECK_NOW = f"{UNLOCK}; SET CONSTRAINTS ALL IMMEDIATE"
# What one call has left for the commit to check: checked now, and left for the commit again.
CHECK_CALL = f"SAVEPOINT outbox_check; {CHECK_NOW}; ROLLBACK TO SAVEPOINT outbox_check"
BEGIN_CALLS, AGAIN = "SAVEPOINT outbox_calls", "ROLLBACK TO SAVEPOINT outbox_calls"
IN_ERROR = 3  # extensions.TRANSACTION_STATUS_INERROR
CLOSED_HERE = 1  # psycopg2's `closed` of a connection that this process has closed; 2 if it was lost
SET_ASIDE = """
INSERT INTO pg_temp.rejections (event_id, reason, detail) SELECT new.event_id, %s, %s FROM pg_temp.new_events AS new
"""
# The keys of a batch are dealt out to workers, those with most events first; what is another worker's is dropped.
KEEP_SHARE = """
DELETE FROM pg_temp.outbox_batch AS batch
 USING (SELECT other.{key} AS key, row_number() OVER (ORDER BY count(*) DESC, other.{key}) %% %(workers)s AS worker
          FROM pg_temp.outbox_batch AS other GROUP BY other.{key}) AS dealt
 WHERE dealt.key = batch.{key} AND dealt.worker <> %(worker)s
"""
UNFINISHED = "SELECT unfinished FROM public.sinks WHERE name = %s"
BEGIN_CALLING = """
UPDATE public.sinks
   SET interruptions = CASE WHEN NOT %(is_first)s THEN interruptions
                            WHEN %(was_calling)s THEN interruptions + 1 ELSE 0 END,
       unfinished = %(unfinished)s
 WHERE name = %(sink)s
RETURNING interruptions
"""
END_CALLING = """
UPDATE public.sinks
   SET interruptions = CASE WHEN %(is_calling)s THEN interruptions ELSE 0 END, unfinished = %(unfinished)s
 WHERE name = %(sink)s
"""
# A letter whose last call has not returned is replayed alone.
WAITING = """
SELECT identity, reason <> %(failed)s OR detail = %(unreturned)s AS is_alone
  FROM public.dead_letters
 WHERE sink = %(sink)s AND status = 'open'
   AND (reason = %(not_called)s
        OR reason = %(failed)s AND retries < %(retries_max)s
           AND clock_timestamp() - last_seen_at
               >= least(%(first_s)s * 2 ^ least(retries, 9), %(most_s)s) * interval '1 second')
 ORDER BY last_seen_at, partition, "offset"
"""
# Parked events with no open letter before them: that was discarded, or was replayed by a process that ended then. An
# event is parked behind the same letters (`PARK_BEHIND_RECORD`, `PARK_BEHIND_VERSION`).
PARKED_FIRST = f"""
SELECT first.identity, true
  FROM (SELECT DISTINCT ON (letter.topic, sha256(letter.key)) letter.* FROM public.dead_letters AS letter
         WHERE letter.sink = %(sink)s AND letter.status = 'open' AND letter.is_event
         ORDER BY letter.topic, sha256(letter.key), letter.version) AS first
 WHERE first.reason = %(parked)s
   AND NOT EXISTS (SELECT FROM public.dead_letters AS letter
                    WHERE CASE WHEN letter.status = 'open' THEN sha256(letter.key) END = sha256(first.key)
                      AND letter.sink = first.sink AND letter.topic = first.topic AND NOT letter.is_event
                      AND {MAY_BLOCK.format(topic_id="first.topic_id")}
                      AND (letter.topic_id <> first.topic_id
                           OR (letter.partition, letter."offset") < (first.partition, first."offset")))
"""  # noqa: S608


class HandlerApplier(CallingApplier):
    """Calls the function for each new event."""

    calls = True
    """Whether it does: otherwise all new events are set aside."""

    def __init__(self, spec: SinkSpec, of: Handler) -> None:
        super().__init__(spec)
        self._handler = of
        self._is_async = of.is_async

    def prepare(self, cursor: extensions.cursor) -> None:
        super().prepare(cursor)
        cursor.execute(GUARD)

    def renew(self, cursor: extensions.cursor) -> None:
        super().renew(cursor)
        cursor.execute("TRUNCATE pg_temp.outbox_uncommitted")

    def keep_share(self, cursor: extensions.cursor, topic: str, worker: int, workers: int) -> int:
        """Drop what belongs to the keys of other workers from the table ``batch``. Returns how many events."""
        self._execute(cursor, KEEP_SHARE, {"topic": topic, "worker": worker, "workers": workers})
        return cursor.rowcount

    def _project(self, cursor: extensions.cursor, parameters: Mapping[str, Any]) -> bool:
        if not self.calls:
            cursor.execute(SET_ASIDE, [NOT_CALLED, INTERRUPTED])
            return True
        events = self._new(cursor, parameters)
        cursor.execute(BEGIN_CALLS)
        problems = self._call_all(cursor, events, "")
        try:
            cursor.execute(CHECK_NOW)
        except psycopg2.Error:  # of a deferred constraint or trigger, whose error at the commit would say no event
            if cursor.connection.closed:
                raise
            cursor.execute(AGAIN)
            problems = self._call_all(cursor, events, CHECK_CALL)
            cursor.execute(CHECK_NOW)
        return self._refuse(cursor, HANDLER_FAILED, problems)

    def _call_all(self, cursor: extensions.cursor, events: Sequence[NewEvent], check: str) -> dict[str, str]:
        """Call the function for these events, with a check behind each if there is one. Returns by event how it failed.

        Nothing is inserted meanwhile: a later failure would undo it.
        """
        cursor.execute(f"{LOCK}; {SAVEPOINT}")
        problems = self._failures(events, lambda one: self._call(cursor, one.event, check))
        cursor.execute(RELEASE)
        return problems

    def _call(self, cursor: extensions.cursor, event: Event, check: str) -> str | None:
        """Call the function. Returns how it failed; then nothing of what it did is left.

        Raises Failure `handler-wrong` if it has ended the transaction or closed the connection, and
        `event-loop-blocked` if another call keeps it from beginning.
        """
        connection, problem = cursor.connection, None
        try:
            given = AsyncConnection(connection) if self._is_async else None
            result = self._handler.function(event, given or connection)
            if result is not None and inspect.isawaitable(result):
                (given or AsyncConnection(connection)).finish(result)
            if connection.get_transaction_status() == IN_ERROR:
                raise RuntimeError("it has caught an error of the database, which has ended its transaction")
            if check:
                cursor.execute(check)
        except (KeyboardInterrupt, LoopBlockedError):
            raise
        except BaseException as error:  # SystemExit and CancelledError too: they would end a thread without a word
            if connection.closed and isinstance(error, psycopg2.Error):
                error.add_note(f"in a call for event {event.id}")
                raise
            problem = first_line(error)
        if connection.closed == CLOSED_HERE:
            raise self._wrong("closed the connection", "let it leave the connection open")
        connection.cursor_factory = None  # type: ignore[assignment] # whatever the function has set
        try:
            cursor.execute(NEXT if problem is None else UNDO)
        except (psycopg2.errors.InvalidSavepointSpecification, psycopg2.errors.NoActiveSqlTransaction) as error:
            remedy = "let it call neither commit nor rollback on the connection"
            raise self._wrong("ended the transaction", remedy) from error
        except psycopg2.Error as error:  # the connection has ended: a call has taken too long, perhaps
            error.add_note(f"in a call for event {event.id}")
            raise
        return problem

    def _wrong(self, what: str, remedy: str) -> Failure:
        return Failure(f"handler {self.name} has {what}", remedy, code="handler-wrong")


class Worker(NamedTuple):
    """A connection beside the sink's own, and what applies on it."""

    connection: extensions.connection
    applier: HandlerApplier


class HandlerWriter(PostgresWriter):
    """Calls the function for what is new, and again for what it has failed for."""

    _applier: HandlerApplier

    def __init__(
        self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch, of: Handler
    ) -> None:
        self._handler = of
        self.connect: Callable[[], extensions.connection] = partial(connect, settings, SinkRole.WRITER)
        """Connects a worker."""
        self._workers: list[Worker] = []
        self._unfinished: dict[str, int] | None = None  # by topic and partition; None before the first batch
        self._workers_since_s = time.monotonic()
        self._look_at_s = self._look_at_parked_s = 0.0
        super().__init__(connection, spec, fetch, lambda _: HandlerApplier(spec, of))

    def _apply(self, batch: Batch) -> Counts:
        is_shared = self._handler.workers > 1
        workers = self._workers_of(batch.chunk.count) if is_shared else ()  # before the calls, which have not begun yet
        calls = not batch.chunk.count or self._begin_calling(batch)
        if not is_shared:
            self._applier.calls = calls
            return super()._apply(batch)
        rows = self._prepared(batch)
        with self._connection, self._connection.cursor() as cursor:
            self._continue(cursor, batch)
            self._renew(cursor)
            dead_letters.insert(cursor, self.name, batch.topic, batch.topic_id, batch.chunk)
        shares = [
            in_thread(f"handle {self.name} {number}", self._apply_share, worker, number, batch, rows, calls)
            for number, worker in enumerate(workers)
        ]
        wait(shares)
        applied = [share.result() for share in shares]
        with self._connection, self._connection.cursor() as cursor:
            self._enter(cursor)
            return self._move_past(cursor, batch, Applied(*map(sum, zip(Applied(0, 0), *applied, strict=True))))

    def _begin_calling(self, batch: Batch) -> bool:
        """Store to where functions may be called. Returns whether they may."""
        ends = _places(batch, batch.end)
        with self._connection, self._connection.cursor() as cursor:
            cursor.execute("SET LOCAL synchronous_commit = off")  # a process that ends does not lose it
            self._require_fence(cursor)
            if is_first := self._unfinished is None:
                cursor.execute(UNFINISHED, [self.name])
                ((stored,),) = cursor.fetchall()
                self._unfinished = {
                    place: end for place, end in stored.items() if place.rpartition("/")[0] in self._spec.topics
                }
            before = self._unfinished or {}
            starts = _places(batch, batch.start)
            begun = {place: end for place, end in ends.items() if end > starts.get(place, 0)}
            self._unfinished = before | {place: max(end, before.get(place, 0)) for place, end in begun.items()}
            names = {"sink": self.name, "is_first": is_first, "was_calling": bool(before)}
            cursor.execute(BEGIN_CALLING, {**names, "unfinished": extras.Json(self._unfinished)})
            ((interruptions,),) = cursor.fetchall()
        return bool(interruptions < INTERRUPTIONS_MAX or not begun.keys() & before.keys())

    def _move_past(self, cursor: extensions.cursor, batch: Batch, applied: Applied) -> Counts:
        ends = _places(batch, batch.end)
        left = {place: end for place, end in (self._unfinished or {}).items() if ends.get(place, 0) < end}
        if left != (self._unfinished or {}):
            names = {"sink": self.name, "is_calling": bool(left), "unfinished": extras.Json(left)}
            cursor.execute(END_CALLING, names)
            self._unfinished = left  # a writer whose commit fails is of no more use
        return super()._move_past(cursor, batch, applied)

    def _workers_of(self, count: int) -> Sequence[Worker]:
        """As many workers as are of use for so many events. Raises Failure if one cannot be connected."""
        wanted = min(count, self._handler.workers)
        if time.monotonic() - self._workers_since_s >= RENEWAL_S:
            for worker in self._workers:
                worker.connection.close()
            self._workers, self._workers_since_s = [], time.monotonic()
            del self.connections[1:]
        while len(self._workers) < wanted:
            self.connections.append(connection := self.connect())
            applier = HandlerApplier(self._spec, self._handler)
            with connection, connection.cursor() as cursor:
                cursor.execute(fence.SESSION)
                applier.prepare(cursor)
            self._workers.append(Worker(connection, applier))
        return self._workers[:wanted]

    def _apply_share(self, worker: Worker, number: int, batch: Batch, rows: Sequence[Encoded], calls: bool) -> Applied:
        """Apply the events of a worker's keys, in a transaction of its own."""
        worker.applier.calls = calls
        what = f"refused offsets {dict(batch.start)} to {dict(batch.end)} of topic {batch.topic}"
        with self._errors(what, worker.connection), worker.connection, worker.connection.cursor() as cursor:
            fence.lock_shared(cursor, self.name)
            fence.require_term(cursor, self.name, self._term)
            worker.applier.take(cursor, rows)
            count = batch.chunk.count
            count -= worker.applier.keep_share(cursor, batch.topic, number, min(count, self._handler.workers))
            if not count:
                return Applied(0, 0)
            dead_letters.drop_resolved(cursor, self.name, batch.topic, batch.topic_id, count=count, fetch=self._fetch)
            return worker.applier.apply(cursor, batch.topic, batch.topic_id, self._fetch)

    def due(self, at_most: int) -> Due:
        """The letters of the events that the function is to be called for again, those first that wait longest. The
        calls are counted before.
        """
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return Due()
        names = {
            "sink": self.name,
            "failed": HANDLER_FAILED,
            "not_called": NOT_CALLED,
            "parked": PARKED,
            "unreturned": UNRETURNED,
            "retries_max": self._handler.attempts - 1,
            "first_s": FIRST_DELAY_S,
            "most_s": MAX_DELAY_S,
        }
        with self._errors("does not say what waits"), self._connection, self._connection.cursor() as cursor:
            cursor.execute(WAITING, names)
            waiting = cursor.fetchall()
            if now_s >= self._look_at_parked_s:
                cursor.execute(PARKED_FIRST, names)
                parked = cursor.fetchall()
                self._look_at_parked_s = now_s + (0 if parked else LOOK_AT_PARKED_EVERY_S)
                waiting = [*parked, *waiting]
            is_first_alone = bool(waiting and waiting[0][1])  # so that none of both kinds holds up the other for long
            together = [] if is_first_alone else [identity for identity, is_alone in waiting if not is_alone]
            due = together[:at_most] or [identity for identity, _ in waiting[:1]]
            if due:
                self._enter(cursor)
                dead_letters.begin_retry(cursor, self.name, due, Rejection(HANDLER_FAILED, UNRETURNED))
        if len(due) == len(waiting):
            self._look_at_s = now_s + LOOK_EVERY_S
        return Due(due, at_most if together else 1)


def _places(batch: Batch, offsets: Mapping[int, int]) -> dict[str, int]:
    """Offsets of a batch by topic and partition."""
    return {f"{batch.topic}/{partition}": offset for partition, offset in offsets.items()}
