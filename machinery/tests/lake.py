"""The sink `lakehouse`: its files, also with an Iceberg table, and a source that has written some events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from deltalake import DeltaTable

from outbox.base.database import connect
from outbox.base.settings import Settings, SourceRole
from outbox.sink.applying.lakehouse import table
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import SinkWriter
from outbox.sinks import IcebergTarget
from tests import items
from tests.support import sink_driver
from tests.support.made_events import NOW_MS, TOPIC, TOPIC_ID, Event, nth_key, uuid7
from tests.support.suite import DOMAIN

NAME = "lakehouse"
HERE = DOMAIN / "stock" / "sinks" / NAME
SCHEMA, TOTALS = HERE / "table.sql", HERE / "projections" / "stock.sql"
CHECKED = " WHEN MATCHED AND FALSE THEN DELETE\n"  # without it Iceberg commits the MERGE unchecked
RANDOM = Random(31)  # noqa: S311


def iceberg(files: Path) -> dict[str, Any]:
    """What its job has in place of its Delta table. The files are made in this folder."""
    schema, strategy = files / "iceberg_table.sql", files / "iceberg.sql"
    schema.write_text(SCHEMA.read_text().replace("USING delta", "USING iceberg"))
    merge = (HERE / "strategies" / "lakehouse.sql").read_text()
    strategy.write_text(merge.replace(" WHEN NOT MATCHED", f"{CHECKED} WHEN NOT MATCHED"))
    return {"target": IcebergTarget(schema, TOTALS), "strategy": strategy}


def folder(settings: Settings) -> Path:
    """The folder of the table."""
    return Path(table.location(settings, NAME).removeprefix("file://"))


def ids(settings: Settings) -> list[str]:
    """The ids in the table."""
    return sorted(DeltaTable(folder(settings)).to_pyarrow_table(columns=["event_id"])["event_id"].to_pylist())


def events(count: int, at_ms: int = NOW_MS, keys: int = 3) -> list[Event]:
    """Events with ids of a moment, all quantities different."""
    return [
        Event(uuid7(RANDOM, at_ms), nth_key(number % keys), 1 + RANDOM.randrange(1_000_000), number // keys + 1)
        for number in range(count)
    ]


@contextmanager
def driven(settings: Settings, spec: SinkSpec) -> Iterator[SinkWriter]:
    """A sink, opened as its stream opens it, until the end of the block."""
    with sink_driver.driving(settings, spec) as sink:
        sink.positions(TOPIC, TOPIC_ID)
        yield sink


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
