"""Examples of docs/reference.md: sinks, a decoder of records that are no declared events, handlers, and a target's
function.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from outbox import Settings, load_settings
from outbox.base.database import connect
from outbox.base.settings import SinkRole
from outbox.handlers import AsyncConnection, Event, handler
from outbox.sinks import (
    UUID,
    Column,
    DecodedEvent,
    IcebergTarget,
    LakehouseTarget,
    PostgresTarget,
    Record,
    RecordDecoder,
    Rejection,
    SinkJob,
    Skipped,
    TopicTarget,
    load_connector,
    load_schema,
    parse_json,
)
from outbox.targets import newest

FOLDER = Path(__file__).parent
ID = "01a1fc75-167d-7239-af57-d1ee1a62e0a6"


class ScaleDecoder(RecordDecoder):
    """Decodes what a scale sends: {"id": "01a1…", "item": "…", "kilograms": 1.5}."""

    key = "item"
    types = MappingProxyType({"weighed": (Column("item", "text", False), Column("kilograms", "numeric", False))})

    def __init__(self, schema: Path) -> None:
        self._schema = load_schema(schema)

    def record(self, record: Record) -> DecodedEvent | Rejection | Skipped:
        sent, rejection = parse_json(record.value)
        if rejection is not None:
            return rejection
        if sent == {"ping": True}:
            return Skipped("ping")
        violation = self._schema.violation(sent)
        if violation is not None:
            return Rejection("schema violation", violation.detail)
        return DecodedEvent(sent["id"], (sent["item"], str(sent["kilograms"])), "weighed")

    def event_id(self, record: Record) -> str | None:
        sent, _ = parse_json(record.value)
        found = sent.get("id") if isinstance(sent, dict) else None
        return found if isinstance(found, str) and UUID.fullmatch(found) else None


DECODER = ScaleDecoder(FOLDER / "weight.schema.json")


def jobs(settings: Settings) -> list[SinkJob]:
    weights = load_connector(settings, "changes").topic  # of the connector that connect/changes.json declares
    return [
        SinkJob(name="orders", events=["order"], target=PostgresTarget()),
        SinkJob(
            name="orders-log",
            events=["order.placed", "order.cancelled"],
            strategy=Path("strategies/lakehouse.sql"),
            target=LakehouseTarget(schema=Path("table.sql"), totals=Path("projections/orders.sql")),
        ),
        SinkJob(
            name="orders-by-customer",
            events=["order"],
            target=TopicTarget("orders-by-customer", by="sinks.by_customer.target:by_customer"),
        ),
        SinkJob(
            name="orders-history",
            events=["order"],
            strategy=Path("strategies/iceberg.sql"),
            target=IcebergTarget(schema=Path("iceberg.sql"), totals=Path("projections/orders.sql")),
        ),
        SinkJob(name="scale", decoders={weights: ScaleDecoder(FOLDER / "weight.schema.json")}),
    ]


def decoded(value: str) -> DecodedEvent | Rejection | Skipped:
    return DECODER.record(Record(key=b"tea", headers=[], value=value.encode(), recorded_ms=0))


def test_a_decoder() -> None:
    assert decoded(f'{{"id": "{ID}", "item": "tea", "kilograms": 1.5}}') == DecodedEvent(ID, ("tea", "1.5"), "weighed")
    assert decoded('{"ping": true}') == Skipped("ping")
    assert decoded("{}") == Rejection("schema violation", '$.id: "id" is a required property')
    assert DECODER.event_id(Record(None, [], f'{{"id": "{ID}"}}'.encode(), 0)) == ID


def test_jobs() -> None:
    names = [job.name for job in jobs(load_settings(environment=False))]
    assert names == ["orders", "orders-log", "orders-by-customer", "orders-history", "scale"]


# Handlers -------------------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from psycopg2.extensions import connection


@handler("order.placed", attempts=3)
def reserve(event: Event, connection: connection) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO reservations (order_id, quantity) VALUES (%s, %s)", [event.key, event.payload["quantity"]]
        )


@handler("order.placed", workers=20, begin="latest")
async def notify(event: Event, connection: AsyncConnection) -> None:
    await connection.execute("INSERT INTO notices (order_id) VALUES (%s)", [event.key])


def test_a_handler_is_an_ordinary_function(databases: Settings) -> None:
    placed = Event("01a1fc75-167d-7239-af57-d1ee1a62e0a6", "order.placed", "order-1", 1, {"quantity": 2})
    with closing(connect(databases, SinkRole.OWNER)) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE reservations (order_id text, quantity int)")
        reserve(placed, connection)
        cursor.execute("SELECT * FROM reservations")
        assert cursor.fetchall() == [("order-1", 2)]
    assert (notify.is_async, notify.workers, notify.begin) == (True, 20, "latest")
    assert (reserve.name, reserve.events, reserve.attempts) == ("reserve", ("order.placed",), 3)


# A target's function --------------------------------------------------------------------------------------------------


INDEX: dict[str, dict[str, Any]] = {}


def write(events: pa.Table) -> None:
    for order in newest(events, key="order_id", version="version").to_pylist():
        INDEX[order["order_id"]] = order


def test_a_batch_is_reduced_to_the_newest_version_of_each_key() -> None:
    events = pa.table(
        {
            "partition": [0, 0, 1, 0],
            "offset": [0, 1, 0, 2],
            "order_id": ["a", "a", "b", "a"],
            "version": [1, 3, 7, 2],
        }
    )
    write(events)
    assert {key: order["version"] for key, order in INDEX.items()} == {"a": 3, "b": 7}
    assert newest(events.slice(0, 0), key="order_id", version="version").num_rows == 0
