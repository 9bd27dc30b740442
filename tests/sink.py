"""Events made up for the sinks, and what their database holds then."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random

import pyarrow as pa
from psycopg2 import extensions

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink import strategy
from outbox.sink.apply import Sink
from outbox.sink.batch import Batch
from outbox.sink.dead_letters import DeadLetter
from outbox.sink.strategy import Strategy
from outbox.sink.traces import Traced
from tests.paths import ROOT

SINKS = ROOT / "sinks"
STRATEGIES = strategy.load(SINKS / "strategies")
PROJECTION = SINKS / "projections" / "balances.sql"
TOPIC = "ledger.events"
TOPIC_ID = "topic-1"
NOW_MS = int(time.time() * 1000)
TRACE = "0123456789abcdef" * 2


def uuid7(random: Random, at_ms: int = NOW_MS) -> str:
    """A UUIDv7 of a moment."""
    number = at_ms << 80 | 7 << 76 | random.getrandbits(12) << 64 | 2 << 62 | random.getrandbits(62)
    return str(uuid.UUID(int=number))


@dataclass(frozen=True)
class Event:
    """An event as a sink stages it, without the place it was read from."""

    event_id: str
    account_id: str
    amount: int
    version: int
    currency: str = "EUR"
    balance_after: int = 0


def account(number: int) -> str:
    """The id of the n-th account."""
    return str(uuid.UUID(int=number))


def rows(events: Sequence[Event], first_offset: int = 0, partition: int = 0) -> pa.Table:
    """The events as rows to stage, one after the other in one partition."""
    columns = {
        "event_id": pa.array([event.event_id for event in events], pa.string()),
        "partition": pa.array([partition] * len(events), pa.int32()),
        "offset": pa.array(range(first_offset, first_offset + len(events)), pa.int64()),
        "account_id": pa.array([event.account_id for event in events], pa.string()),
        "amount": pa.array([event.amount for event in events], pa.int64()),
        "currency": pa.array([event.currency for event in events], pa.string()),
        "balance_after": pa.array([event.balance_after for event in events], pa.int64()),
        "version": pa.array([event.version for event in events], pa.int64()),
        "occurred_at": pa.array([datetime.now(UTC)] * len(events), pa.timestamp("us", tz="UTC")),
    }
    return pa.table(columns)


def batch(
    events: Sequence[Event],
    start: int = 0,
    end: int | None = None,
    *,
    partition: int = 0,
    topic_id: str = TOPIC_ID,
    dead: Sequence[DeadLetter] = (),
) -> Batch:
    """A batch of one partition; it ends behind its last event, unless said otherwise."""
    until = start + len(events) + len(dead) if end is None else end
    return Batch(TOPIC, topic_id, {partition: start}, {partition: until}, rows(events, start, partition), dead)


def traced(events: Sequence[Event], start: int = 0, dead: Sequence[DeadLetter] = ()) -> Batch:
    """A batch each of whose records is in the trace."""
    good = [Traced(TRACE, event.event_id, 0, start + number) for number, event in enumerate(events)]
    bad = [Traced(TRACE, None, 0, letter.offset) for letter in dead]
    return replace(batch(events, start, dead=dead), traced=good + bad)


@contextmanager
def open_sink(settings: Settings, name: str = "dedup") -> Iterator[Sink]:
    """The sink of a strategy, with the fence, until the end of the block."""
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        yield sink_on(connection, STRATEGIES[name])


def sink_on(
    connection: extensions.connection, chosen: Strategy = STRATEGIES["dedup"], projection: Path = PROJECTION
) -> Sink:
    """The sink of a strategy on a connection."""
    return Sink(connection, chosen, SINKS / "staged.sql", projection)


@dataclass
class Database:
    """What the balances database holds, read as the sink's role."""

    settings: Settings
    sink: str = "dedup"

    def query(self, sql: str, *parameters: object) -> list[tuple[object, ...]]:
        """The rows of a query."""
        with closing(connect(self.settings, SinkRole.WRITER)) as connection, connection.cursor() as cursor:
            cursor.execute(sql, parameters or None)
            return list(cursor.fetchall())

    def balances(self) -> dict[str, int]:
        """The balance of each account."""
        found = self.query("SELECT account_id, balance_minor FROM balances WHERE sink = %s", self.sink)
        return {str(key): int(str(total)) for key, total in found}

    def positions(self) -> dict[int, int]:
        """The next offset of each partition."""
        found = self.query("SELECT partition, next_offset FROM positions WHERE sink = %s", self.sink)
        return {int(str(partition)): int(str(offset)) for partition, offset in found}

    def processed(self) -> int:
        """How many events are remembered."""
        return int(str(self.query("SELECT count(*) FROM processed_events WHERE sink = %s", self.sink)[0][0]))

    def dead_letters(self) -> dict[str, str]:
        """The reason of each dead letter, by its identity."""
        found = self.query("SELECT identity, reason FROM dead_letters WHERE sink = %s", self.sink)
        return {str(identity): str(reason) for identity, reason in found}


def sums(events: Iterable[Event]) -> Mapping[str, int]:
    """What the balances are when each of these is applied."""
    totals: dict[str, int] = {}
    for event in events:
        totals[event.account_id] = totals.get(event.account_id, 0) + event.amount
    return totals
