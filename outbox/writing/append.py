"""Append events to the outbox, in the transaction of the change that they tell about: the whole trick.

    with engine.begin() as connection:          # or a Session's own connection: session.connection()
        connection.execute(...)                 # the change
        append(connection, Event("order", order_id, "order.placed", {"order_id": order_id}))

Both are committed or neither is. Debezium reads the committed rows from the write-ahead log and sends each to Kafka at
least once, so an event needs nothing but this row: never send it yourself as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Column, Connection, MetaData, SmallInteger, Table, Text, Uuid, text
from sqlalchemy.dialects.postgresql import JSONB, TIMESTAMP

OUTBOX = Table(
    "outbox",
    MetaData(),
    Column("id", Uuid, primary_key=True, server_default=text("uuidv7()")),
    Column("aggregatetype", Text, nullable=False),
    Column("aggregateid", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("schema_version", SmallInteger, nullable=False, server_default=text("1")),
    Column("payload", JSONB, nullable=False),
    Column(
        "occurred_at",
        TIMESTAMP(precision=6),
        nullable=False,
        server_default=text("(clock_timestamp() AT TIME ZONE 'utc'::text)"),
    ),
    Column("traceparent", Text),
)


@dataclass(frozen=True)
class Event:
    """One event. Kafka keeps the order of events with the same ``aggregateid``, which is their key."""

    aggregatetype: str
    aggregateid: str
    type: str
    payload: Mapping[str, Any]  # to be sent as JSON; what the consumers rely on is connect/events/*.schema.json
    schema_version: int = 1
    traceparent: str | None = None  # W3C trace context of the request that caused it


def append(connection: Connection, *events: Event) -> None:
    """Insert the events, in this order, by one statement. Never commits.

    The database gives each its id (a UUIDv7) and its time. Payloads are not checked against their schema here: a test
    of your service does that. Raises what SQLAlchemy raises: StatementError for a payload that is no JSON,
    IntegrityError for one of more than a megabyte, which would not fit into a record.
    """
    if events:
        # inline: no RETURNING, which a role that may only INSERT is refused.
        connection.execute(OUTBOX.insert().inline(), [asdict(event) for event in events])
