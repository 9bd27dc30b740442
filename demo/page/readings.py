"""Readings of each part of the chain at one moment. A part that does not answer is `Down`, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Offsets = Mapping[str, Mapping[int, int]]  # by topic and partition


@dataclass(frozen=True)
class Down:
    """A part that did not answer."""

    reason: str


@dataclass(frozen=True)
class OutboxRow:
    """A row of the outbox."""

    id: str
    aggregate: str
    type: str
    schema_version: int
    key: str
    amount: int | None  # None for events that move no money
    occurred_ms: int


@dataclass(frozen=True)
class Total:
    """The total of a key, after so many events."""

    total: int
    version: int


@dataclass(frozen=True)
class Source:
    """The service's database."""

    accounts: int
    transfers: int
    events: int  # in the outbox
    end_lsn: int  # of the write-ahead log, read after the rows
    rows: Sequence[OutboxRow] = ()  # the newest, and those of new records; some were there before
    totals: Mapping[str, Total] = field(default_factory=dict)
    oldest_ms: int | None = None  # when the oldest row was written: older ones were pruned


@dataclass(frozen=True)
class Slot:
    """Debezium's replication slot."""

    is_active: bool
    confirmed_lsn: int
    lag_bytes: int


@dataclass(frozen=True)
class Connector:
    """Debezium, as Kafka Connect reports it."""

    state: str  # of the connector
    task: str
    mode: str  # the effective exactly-once mode
    boundary: str | None
    error: str | None


@dataclass(frozen=True)
class Record:
    """A record of a topic."""

    topic: str
    partition: int
    offset: int
    event_id: str | None  # None: not written by the relay
    key: str
    headers: Mapping[str, str]
    value: str
    at_ms: int  # its timestamp: when Debezium read the row


@dataclass(frozen=True)
class Topics:
    """The topics of the events, up to their last stable offsets."""

    ends: Offsets
    records: Sequence[Record] = ()  # new ones


@dataclass(frozen=True)
class Batch:
    """A micro-batch that Spark has planned."""

    number: int
    ends: Offsets
    committed_ms: int | None  # when Spark recorded it as committed; None if it has not


@dataclass(frozen=True)
class Sink:
    """A sink, as its tables have it."""

    name: str
    strategy: str
    transform: str | None
    generation: int
    applied: int
    duplicates: int
    set_aside: int
    positions: Offsets
    totals: Mapping[str, Total] | None  # None: its result is no balance of accounts
    batches: Sequence[Batch] = ()


@dataclass(frozen=True)
class Readings:
    """The whole chain at about one moment."""

    at_ms: int
    source: Source | Down
    slot: Slot | Down
    connector: Connector | Down
    topics: Topics | Down
    sinks: Sequence[Sink] | Down
    health: Mapping[str, Any] | Down  # by sink its state
