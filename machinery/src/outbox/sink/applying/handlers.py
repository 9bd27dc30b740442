"""Handlers: functions of a service that react to events, each event once in effect.

    @handler("order.placed")
    def send_receipt(event, connection):
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO receipts (order_id) VALUES (%s)", [event.payload["order_id"]])

This is the inbox pattern. A handler is a sink whose target calls a function: the id of the event, and what the function
does on the connection, are committed together or not at all. An effect elsewhere, such as an e-mail, happens at least
once; ``event.id`` is the key by which its receiver can recognise a repetition.

A function that raises loses its own changes alone. Its event becomes a dead letter, later events of the key wait behind
that, and those of other keys go on. It is retried after a while, at most so many times: `outbox dead-letters` shows it
all the time, and replays it on demand. Events of a key come in the order of their versions; without a version there is
no order to keep.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from outbox.base import log
from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.heavy import extensions, psycopg2, sql
from outbox.base.settings import Settings, SinkRole
from outbox.events.schema import shortened
from outbox.events.values import decode
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.applying.postgres.target import PostgresTarget, PostgresWriter
from outbox.sink.decoding.layout import view_name
from outbox.sink.decoding.records import Fetch
from outbox.sink.spec import SinkSpec, Transformed

if TYPE_CHECKING:
    from outbox.sink.writer import SinkWriter

HANDLER_FAILED = "handler failed"
ATTEMPTS_MAX = 8
FIRST_DELAY_S, MAX_DELAY_S = 1.0, 60.0
LOOK_EVERY_S = 0.5  # at what waits for another attempt
EVENTS_MAX = 500  # in one transaction, whose locks others may wait for
SAVEPOINT, RELEASE, UNDO = (
    f"{words} outbox_handler" for words in ("SAVEPOINT", "RELEASE SAVEPOINT", "ROLLBACK TO SAVEPOINT")
)
# A function that commits would commit the ids of events that it was not called for yet. So while functions are called,
# the transaction holds two equal rows, which no commit allows.
GUARD = "CREATE TEMPORARY TABLE outbox_uncommitted (number int UNIQUE DEFERRABLE INITIALLY DEFERRED)"
LOCK, UNLOCK = "INSERT INTO pg_temp.outbox_uncommitted VALUES (1), (1)", "DELETE FROM pg_temp.outbox_uncommitted"
EVENTS = 'SELECT one.partition, one."offset", one.event_id::text, to_jsonb(one.*)::text FROM {view} AS one'
REJECT = "INSERT INTO pg_temp.rejections (event_id, reason, detail) VALUES (%s, %s, %s)"
WAITING = "SELECT identity FROM public.dead_letters WHERE sink = %s AND status = 'open' AND reason = %s"


class Event(NamedTuple):
    """An event as its handler gets it, upcast to the newest version.

    ``payload`` is what JSON has; numbers with a fraction are Decimal, and properties that are left out are None.
    """

    id: str
    type: str  # as in connect/events: ``order.placed``
    key: str
    version: int | None  # of the key, if its events are numbered
    payload: Mapping[str, Any]


Function = Callable[[Event, "extensions.connection"], Awaitable[None] | None]


@dataclass(frozen=True)
class Handler:
    """A function, and the events that it is called for. It can be called as the function itself."""

    name: str
    events: Sequence[str]
    function: Function
    attempts: int

    def __call__(self, event: Event, connection: extensions.connection) -> Awaitable[None] | None:
        return self.function(event, connection)


def handler(*events: str, name: str = "", attempts: int = ATTEMPTS_MAX) -> Callable[[Function], Handler]:
    """Let a function handle events, named as in a job: ``order``, ``order.placed`` or ``order.placed.v1``.

    The function gets an `Event` and the connection, in a transaction that it must not end. It may be ``async``.
    ``name`` is by default that of the function; the name is what remembers which events were handled, so a function can
    be renamed only with ``name``. ``attempts`` is how often it is called for an event that it fails for.
    """

    def decorate(function: Function) -> Handler:
        return Handler(name or function.__name__, events, function, attempts)

    return decorate


class HandlerApplier(PostgresApplier):
    """Calls the function for each new event, in the order of the topic."""

    def __init__(self, spec: SinkSpec, of: Handler) -> None:
        super().__init__(spec, ())
        self._is_ordered = spec.has_version
        self._handler = of
        self._views = {event: sql.Identifier("pg_temp", view_name(event)) for event in spec.layout.types}

    def prepare(self, cursor: extensions.cursor) -> None:
        super().prepare(cursor)
        cursor.execute(GUARD)

    def _project(self, cursor: extensions.cursor, parameters: Mapping[str, Any]) -> bool:
        has_failed, failed_keys = False, set[str]()
        decoder = self._decoders[parameters["topic"]]
        cursor.execute(LOCK)
        with asyncio.Runner() as runner:
            for event in self._new(cursor, decoder.types, decoder.key, decoder.version):
                if event.key in failed_keys:
                    continue  # it waits, as one of a later batch would
                problem = self._call(cursor, event, runner)
                if problem is not None:
                    cursor.execute(REJECT, [event.id, HANDLER_FAILED, problem])
                    has_failed = True
                    if self._is_ordered:
                        failed_keys.add(event.key)
        cursor.execute(UNLOCK)
        return has_failed

    def _new(self, cursor: extensions.cursor, types: Mapping[str, Any], key: str, version: str | None) -> list[Event]:
        """The new events, in the order of the topic."""
        found = list[tuple[int, int, Event]]()
        for event in types:
            cursor.execute(sql.SQL(EVENTS).format(view=self._views[event]))
            for partition, offset, event_id, text in cursor:
                payload = decode(text.encode())
                for name in ("event_id", "partition", "offset"):
                    del payload[name]
                number = None if version is None else payload[version]
                found.append((partition, offset, Event(event_id, event, str(payload[key]), number, payload)))
        return [event for *_, event in sorted(found, key=lambda one: one[:2])]

    def _call(self, cursor: extensions.cursor, event: Event, runner: asyncio.Runner) -> str | None:
        """Call the function. Returns how it failed; then nothing of what it did is left.

        Raises Failure `handler-wrong` if it has ended the transaction.
        """
        connection = cursor.connection
        cursor.execute(SAVEPOINT)
        problem = None
        try:
            result = self._handler.function(event, connection)
            if inspect.isawaitable(result):
                runner.run(_finished(result))
            if connection.get_transaction_status() == extensions.TRANSACTION_STATUS_INERROR:
                raise RuntimeError("it has caught an error of the database, which has ended its transaction")
        except Exception as error:
            if connection.closed:
                raise
            problem = shortened(f"{type(error).__name__}: {error}".strip().partition("\n")[0])
        try:
            if problem is not None:
                cursor.execute(UNDO)
            cursor.execute(RELEASE)
        except (psycopg2.errors.InvalidSavepointSpecification, psycopg2.errors.NoActiveSqlTransaction) as error:
            raise Failure(
                f"handler {self.name} has ended the transaction",
                "let it call neither commit nor rollback on the connection",
                code="handler-wrong",
            ) from error
        return problem


async def _finished(result: Awaitable[None]) -> None:
    await result


class HandlerWriter(PostgresWriter):
    """Calls the function for what is new, and again for what it has failed for."""

    def __init__(
        self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch, of: Handler
    ) -> None:
        self._settings, self._handler = settings, of
        self._attempts: dict[str, tuple[int, float]] = {}  # by letter how many, and when the next is due
        self._look_at_s = 0.0
        super().__init__(connection, spec, fetch, HandlerApplier(spec, of))

    def tend(self) -> None:
        """Call the function again for the events that are due. Attempts of before a start do not count."""
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_EVERY_S
        with self._errors("does not say what waits"), self._connection, self._connection.cursor() as cursor:
            cursor.execute(WAITING, [self.name, HANDLER_FAILED])
            waiting = [identity for (identity,) in cursor]
        self._attempts = {one: self._attempts.get(one, (1, now_s + FIRST_DELAY_S)) for one in waiting}
        due = [one for one, (_, at_s) in self._attempts.items() if at_s <= now_s]
        if due:
            self._retry(due)

    def _retry(self, due: Sequence[str]) -> None:
        """Replay these letters, with those that wait behind them, on a connection with tables of its own."""
        from outbox.sink.repair.replay import Selection, replay

        with closing(connect(self._settings, SinkRole.WRITER)) as connection:
            chosen = Selection(sink=self.name, identities=due).choose(connection)
            replay(
                connection, {self.name: self._spec}, chosen, applier_of=lambda spec: HandlerApplier(spec, self._handler)
            )
        for one in due:
            attempts = self._attempts[one][0] + 1
            delay_s = min(FIRST_DELAY_S * 2 ** (attempts - 1), MAX_DELAY_S)
            is_last = attempts >= self._handler.attempts
            self._attempts[one] = attempts, float("inf") if is_last else time.monotonic() + delay_s
            if is_last:
                log.get(__name__).warning("handler gives up", handler=self.name, event_id=one, attempts=attempts)


class HandlerTarget(PostgresTarget):
    """A function, and whatever it writes on the connection."""

    engines = ("plain",)
    records_max = EVENTS_MAX

    def __init__(self, of: Handler) -> None:
        self._handler = of

    def require_usable(self, spec: SinkSpec) -> None:
        HandlerApplier(spec, self._handler)

    def require_rebuildable(self, spec: SinkSpec) -> None:
        raise Failure(
            f"handler {spec.name} is a function: what it has done cannot be computed again",
            f"`outbox dead-letters replay --sink {spec.name}` calls it for events that were set aside",
            code="rebuild-unsupported",
        )

    def writer(self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch) -> SinkWriter:
        return HandlerWriter(settings, connection, spec, fetch, self._handler)

    def applier(self, settings: Settings, spec: SinkSpec, transform: Transformed | None = None) -> HandlerApplier:
        del settings, transform
        return HandlerApplier(spec, self._handler)
