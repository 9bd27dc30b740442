"""The folders of the sink `lakehouse`, and a source that has written some events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from deltalake import DeltaTable

from outbox.base.database import connect
from outbox.base.settings import Settings, SourceRole
from outbox.sink.applying.lakehouse import table
from tests import items
from tests.support.made_events import Event

NAME = "lakehouse"


def folder(settings: Settings) -> Path:
    """The folder of the table."""
    return Path(table.location(settings, NAME).removeprefix("file://"))


def ids(settings: Settings) -> list[str]:
    """The ids in the table."""
    return sorted(DeltaTable(folder(settings)).to_pyarrow_table(columns=["event_id"])["event_id"].to_pylist())


def write_source(settings: Settings, some: Sequence[Event]) -> None:
    """Make the source one that has written these events."""
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection, connection.cursor() as cursor:
        for event in some:
            cursor.execute(
                "INSERT INTO items (id, unit, stock, version) VALUES (%s, %s, %s, %s)"
                " ON CONFLICT (id) DO UPDATE SET stock = items.stock + excluded.stock, version = excluded.version",
                [event.key, event.unit, event.quantity, event.version],
            )
            cursor.execute(
                "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) VALUES (%s, %s, %s, %s, %s)",
                [event.event_id, items.AGGREGATE, event.key, event.type, json.dumps(event.payload())],
            )
