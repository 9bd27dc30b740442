"""Examples of docs/reference.md: sinks, and a decoder of records that are no declared events."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from outbox import Settings, load_settings
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


def test_an_iceberg_target_is_where_its_job_is() -> None:
    target = IcebergTarget(schema=Path("table.sql"), totals=Path("projections/orders.sql"))
    assert vars(target.within(FOLDER)) == vars(IcebergTarget(FOLDER / "table.sql", FOLDER / "projections/orders.sql"))
    assert isinstance(target.within(FOLDER), IcebergTarget)


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
