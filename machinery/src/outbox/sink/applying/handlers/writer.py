"""How handlers are called: each event in a savepoint of the transaction that applies, in the order of the topic."""

from __future__ import annotations

import inspect
import math
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outbox.base.errors import Failure
from outbox.base.heavy import extensions, extras, psycopg2, sql
from outbox.events.schema import shortened
from outbox.events.values import decode
from outbox.sink.applying.handlers.handler import Event, Handler
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.decoding.layout import view_name
from outbox.sink.decoding.records import Fetch
from outbox.sink.spec import SinkSpec

if TYPE_CHECKING:
    import asyncio

HANDLER_FAILED = "handler failed"
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0
LOOK_EVERY_S = 0.5  # at what waits for another attempt
SAVEPOINT, RELEASE, UNDO = (
    f"{words} outbox_handler" for words in ("SAVEPOINT", "RELEASE SAVEPOINT", "ROLLBACK TO SAVEPOINT")
)
NEXT = f"{RELEASE}; {SAVEPOINT}"  # in one round trip, after a call that did well; one that failed leaves the savepoint
# A function that commits would commit the ids of events that it was not called for yet. So while functions are called,
# the transaction holds two equal rows, which no commit allows.
GUARD = "CREATE TEMPORARY TABLE outbox_uncommitted (number int UNIQUE DEFERRABLE INITIALLY DEFERRED)"
LOCK, UNLOCK = "INSERT INTO pg_temp.outbox_uncommitted VALUES (1), (1)", "DELETE FROM pg_temp.outbox_uncommitted"
CHECK_NOW = f"{UNLOCK}; SET CONSTRAINTS ALL IMMEDIATE"
# What one call has left for the commit to check: checked now, and left for the commit again.
CHECK_CALL = f"SAVEPOINT outbox_check; {CHECK_NOW}; ROLLBACK TO SAVEPOINT outbox_check"
BEGIN_CALLS, AGAIN = "SAVEPOINT outbox_calls", "ROLLBACK TO SAVEPOINT outbox_calls"
EVENTS = 'SELECT one.partition, one."offset", one.event_id::text, to_jsonb(one.*)::text FROM {view} AS one'
REJECT = "INSERT INTO pg_temp.rejections (event_id, reason, detail) VALUES %s"
CLOSED_HERE = 1  # psycopg2's `closed` of a connection that this process has closed; 2 if it was lost
WAITING = "SELECT identity FROM public.dead_letters WHERE sink = %s AND status = 'open' AND reason = %s"


class HandlerApplier(PostgresApplier):
    """Calls the function for each new event, in the order of the topic."""

    def __init__(self, spec: SinkSpec, of: Handler) -> None:
        super().__init__(spec, ())
        self._is_ordered = any(decoder.version is not None for decoder in spec.decoders.values())
        self._handler = of
        self._views = {event: sql.Identifier("pg_temp", view_name(event)) for event in spec.layout.types}

    def prepare(self, cursor: extensions.cursor) -> None:
        super().prepare(cursor)
        cursor.execute(GUARD)

    def renew(self, cursor: extensions.cursor) -> None:
        super().renew(cursor)
        cursor.execute("TRUNCATE pg_temp.outbox_uncommitted")

    def _project(self, cursor: extensions.cursor, parameters: Mapping[str, Any]) -> bool:
        decoder = self._decoders[parameters["topic"]]
        events = self._new(cursor, decoder.types, decoder.key, decoder.version)
        cursor.execute(BEGIN_CALLS)
        problems = self._call_all(cursor, events, "")
        try:
            cursor.execute(CHECK_NOW)
        except psycopg2.IntegrityError:  # of a deferred constraint, whose error at the commit would say no event
            cursor.execute(AGAIN)
            problems = self._call_all(cursor, events, CHECK_CALL)
            cursor.execute(CHECK_NOW)
        rejections = [(event_id, HANDLER_FAILED, problem) for event_id, problem in problems.items()]
        extras.execute_values(cursor, REJECT, rejections)
        return bool(problems)

    def _call_all(self, cursor: extensions.cursor, events: Sequence[Event], check: str) -> dict[str, str]:
        """Call the function for these events, with a check behind each if there is one. Returns by event how it failed.

        Nothing is inserted meanwhile: a later failure would undo it.
        """
        problems = dict[str, str]()
        failed_at = dict[str, int]()  # by key the first version that has failed
        cursor.execute(f"{LOCK}; {SAVEPOINT}")
        import asyncio  # takes long

        with asyncio.Runner() as runner:
            for event in events:
                version = event.version or 0
                if event.key in failed_at and version > failed_at[event.key]:
                    continue  # PARK_BEHIND_VERSION says the same of it
                problem = self._call(cursor, event, runner, check)
                if problem is not None:
                    problems[event.id] = problem
                    if event.version is not None:
                        failed_at.setdefault(event.key, version)
        cursor.execute(RELEASE)
        return problems

    def _new(self, cursor: extensions.cursor, types: Mapping[str, Any], key: str, version: str | None) -> list[Event]:
        """The new events, in the order of the topic; those of a key in the order of their versions, which is another
        one where partitions were added.
        """
        found = list[tuple[int, int, Event]]()
        for event in types:
            cursor.execute(sql.SQL(EVENTS).format(view=self._views[event]))
            for partition, offset, event_id, text in cursor:
                payload = decode(text.encode())
                for name in ("event_id", "partition", "offset"):
                    del payload[name]
                number = None if version is None else payload[version]
                found.append((partition, offset, Event(event_id, event, str(payload[key]), number, payload)))
        events = [event for *_, event in sorted(found, key=lambda one: one[:2])]
        if version is None:
            return events
        of_keys = defaultdict[str, deque[Event]](deque)
        for one in sorted(events, key=lambda one: one.version or 0):
            of_keys[one.key].append(one)
        return [of_keys[one.key].popleft() for one in events]

    def _call(self, cursor: extensions.cursor, event: Event, runner: asyncio.Runner, check: str) -> str | None:
        """Call the function. Returns how it failed; then nothing of what it did is left.

        Raises Failure `handler-wrong` if it has ended the transaction or closed the connection.
        """
        connection, problem = cursor.connection, None
        try:
            result = self._handler.function(event, connection)
            if inspect.isawaitable(result):
                runner.run(_finished(result))
            if connection.get_transaction_status() == extensions.TRANSACTION_STATUS_INERROR:
                raise RuntimeError("it has caught an error of the database, which has ended its transaction")
            if check:
                cursor.execute(check)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and CancelledError too: they would end a thread without a word
            if connection.closed and isinstance(error, psycopg2.Error):
                error.add_note(f"in a call for event {event.id}")
                raise
            problem = shortened(f"{type(error).__name__}: {error}".strip().partition("\n")[0])
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


async def _finished(result: Awaitable[None]) -> None:
    await result


class HandlerWriter(PostgresWriter):
    """Calls the function for what is new, and again for what it has failed for."""

    def __init__(self, connection: extensions.connection, spec: SinkSpec, fetch: Fetch, of: Handler) -> None:
        self._handler = of
        self._attempts: dict[str, tuple[int, float]] = {}  # by letter how many, and when the next is due
        self._look_at_s = 0.0
        super().__init__(connection, spec, fetch, HandlerApplier(spec, of))

    def due(self, at_most: int) -> Sequence[str]:
        """The letters of the events that the function is to be called for again, those first that wait longest.
        Attempts before a start do not count.
        """
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return []
        with self._errors("does not say what waits"), self._connection, self._connection.cursor() as cursor:
            cursor.execute(WAITING, [self.name, HANDLER_FAILED])
            waiting = [identity for (identity,) in cursor]
        self._attempts = {one: self._attempts.get(one) or self._next(1) for one in waiting}
        all_due = sorted((at_s, one) for one, (_, at_s) in self._attempts.items() if at_s <= time.monotonic())
        due = [one for _, one in all_due[:at_most]]
        self._attempts |= {one: self._next(self._attempts[one][0] + 1) for one in due}
        if len(due) == len(all_due):
            self._look_at_s = now_s + LOOK_EVERY_S
        return due

    def _next(self, attempts: int) -> tuple[int, float]:
        """So many attempts, and when another one is due behind them."""
        if attempts >= self._handler.attempts:
            return attempts, math.inf
        return attempts, time.monotonic() + min(FIRST_DELAY_S * 2 ** (attempts - 1), MAX_DELAY_S)
