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

from outbox.base import settings as configuration
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink import strategy
from outbox.sink.batch import Batch, DeadRecord, Traced
from outbox.sink.postgres.writer import PostgresWriter
from outbox.sink.records import Event as DecodedEvent
from outbox.sink.records import Record, RecordDecoder, Rejection
from outbox.sink.spec import SinkJob, SinkSpec
from outbox.sink.strategy import Strategy
from sinks.balances import job as balances
from tests.paths import ROOT

SINKS = ROOT / "sinks"
STRATEGIES = strategy.load(strategy.BUILT_IN)
PROJECTIONS = balances.PROJECTIONS
DECODER = balances.decoder(configuration.load(environment=False))
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

    @property
    def decoded(self) -> DecodedEvent:
        """The event as the decoder returns it."""
        columns = {**vars(self), "transfer_id": self.event_id, "occurred_at": datetime.now(UTC)}
        return DecodedEvent(self.event_id, tuple(columns[column.name] for column in DECODER.columns))


def account(number: int) -> str:
    """The id of the n-th account."""
    return str(uuid.UUID(int=number))


def rows(events: Sequence[Event], first_offset: int = 0, partition: int = 0) -> pa.Table:
    """The events as rows to stage, one after the other in one partition."""
    places = [(partition, offset) for offset in range(first_offset, first_offset + len(events))]
    return DECODER.rows([event.decoded for event in events], places)


def batch(
    events: Sequence[Event],
    start: int = 0,
    end: int | None = None,
    *,
    partition: int = 0,
    topic_id: str = TOPIC_ID,
    dead: Sequence[DeadRecord] = (),
) -> Batch:
    """A batch of one partition; it ends behind its last event, unless said otherwise."""
    until = start + len(events) + len(dead) if end is None else end
    return Batch(TOPIC, topic_id, {partition: start}, {partition: until}, rows(events, start, partition), dead)


def dead_record(
    offset: int,
    event_id: str | None = None,
    value: bytes | None = b"bad",
    *,
    key: bytes | None = b"key",
    reason: str = "not JSON",
    partition: int = 0,
) -> DeadRecord:
    """A record that is no event."""
    record = Record(key, [("h", b"\xff")], value, NOW_MS)
    return DeadRecord(partition, offset, record, event_id, Rejection(reason, "a detail"))


def traced(events: Sequence[Event], start: int = 0, dead: Sequence[DeadRecord] = ()) -> Batch:
    """A batch each of whose records is in the trace."""
    good = [Traced(TRACE, event.event_id, 0, start + number) for number, event in enumerate(events)]
    bad = [Traced(TRACE, None, 0, one.offset) for one in dead]
    return replace(batch(events, start, dead=dead), traced=good + bad)


@contextmanager
def open_sink(settings: Settings, name: str = "dedup") -> Iterator[PostgresWriter]:
    """The sink of a strategy, with the fence, until the end of the block."""
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        yield sink_on(connection, STRATEGIES[name])


def sink_on(
    connection: extensions.connection, chosen: Strategy = STRATEGIES["dedup"], projections: Path = PROJECTIONS
) -> PostgresWriter:
    """The sink of a strategy on a connection. ``projections`` is the folder of its projections."""
    return PostgresWriter(connection, SinkSpec(job_with(projections), chosen))


def job_with(projections: Path = PROJECTIONS, decoder: RecordDecoder = DECODER) -> SinkJob:
    """The job of the events, with other projections."""
    return SinkJob(topic=TOPIC, decoder=decoder, projections=projections)


def projections_in(folder: Path, sql: str, name: str = "balances") -> Path:
    """A folder with one projection of this SQL, for strategies that take events and for those that take states."""
    made = folder / f"projections-{uuid.uuid4().hex[:8]}"
    made.mkdir()
    for suffix in (".sql", ".states.sql"):
        (made / f"{name}{suffix}").write_text(sql)
    return made


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

    def statuses(self) -> dict[str, str]:
        """The status of each dead letter, by its identity."""
        found = self.query("SELECT identity, status FROM dead_letters WHERE sink = %s", self.sink)
        return {str(identity): str(status) for identity, status in found}


def sums(events: Iterable[Event]) -> Mapping[str, int]:
    """What the balances are when each of these is applied."""
    totals: dict[str, int] = {}
    for event in events:
        totals[event.account_id] = totals.get(event.account_id, 0) + event.amount
    return totals
