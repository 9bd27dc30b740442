"""What the folders of the sink `lakehouse` hold, and a ledger that has written some events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from deltalake import DeltaTable
from outbox.base.database import connect
from outbox.base.settings import Settings, SourceRole
from outbox.sink.lakehouse import table

from tests.support.made_events import Event

NAME = "lakehouse"


def folder(settings: Settings) -> Path:
    """The folder of the table."""
    return Path(table.location(settings, NAME).removeprefix("file://"))


def ids(settings: Settings) -> list[str]:
    """The ids in the table."""
    return sorted(DeltaTable(folder(settings)).to_pyarrow_table(columns=["event_id"])["event_id"].to_pylist())


def staged_files(settings: Settings) -> list[str]:
    """The files that tasks have left, by epoch and attempt."""
    staging = Path(f"{folder(settings)}.staging")
    return sorted(str(file.relative_to(staging)) for file in staging.rglob("*.parquet"))


def write_ledger(settings: Settings, some: Sequence[Event]) -> None:
    """Make the ledger one that has written these events."""
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection, connection.cursor() as cursor:
        for event in some:
            cursor.execute(
                "INSERT INTO accounts (id, kind, currency, balance_minor, version) VALUES (%s, 'system', 'EUR', %s, %s)"
                " ON CONFLICT (id) DO UPDATE SET balance_minor = accounts.balance_minor + excluded.balance_minor,"
                " version = excluded.version",
                [event.key, event.quantity, event.version],
            )
            cursor.execute(
                "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) VALUES (%s, 'balance', %s, %s, %s)",
                [event.event_id, event.key, event.type, json.dumps(event.payload())],
            )
