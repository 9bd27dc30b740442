"""A change of an item, as Debezium reports it. Table, key, LSN and operation make up its id."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from types import MappingProxyType

from outbox.sinks import UUID, Column, DecodedEvent, Record, RecordDecoder, Rejection, load_schema, parse_json

CHANGE = "item.change"
TABLE = "items"
COLUMNS = (
    Column("table_name", "text", is_nullable=False),
    Column("item_id", "uuid", is_nullable=False),
    Column("op", "text", is_nullable=False),  # r: of a snapshot; c, u, d: inserted, updated, deleted
    Column("lsn", "bigint", is_nullable=False),
    Column("unit", "text", is_nullable=True),  # the rest is the row afterwards; NULL if it was deleted
    Column("stock", "bigint", is_nullable=True),
    Column("version", "bigint", is_nullable=True),
)


class ChangeDecoder(RecordDecoder):
    """Decodes changes of the table ``items``."""

    key = "item_id"
    version = "version"
    types = MappingProxyType({CHANGE: COLUMNS})

    def __init__(self) -> None:
        self._schema = load_schema(Path(__file__).with_name("item-change.schema.json"))

    def record(self, record: Record) -> DecodedEvent | Rejection:
        """The change of a record, or why the record was rejected."""
        change, rejection = parse_json(record.value)
        if rejection is not None:
            return rejection
        violation = self._schema.violation(change)
        if violation is not None:
            return Rejection("schema violation", violation.detail)
        op, lsn = change["op"], int(change["source"]["lsn"])
        row = change["before" if op == "d" else "after"]
        state = (None, None, None) if op == "d" else (row["unit"], int(row["stock"]), int(row["version"]))
        return DecodedEvent(change_id(row["id"], lsn, op), (TABLE, row["id"], op, lsn, *state), CHANGE)

    def event_id(self, record: Record) -> str | None:
        """The id of a change whose record says key, LSN and operation, valid or not."""
        change, _ = parse_json(record.value)
        match change:
            case {"op": "d", "before": {"id": str(key)}, "source": {"lsn": int(lsn)}}:
                op = "d"
            case {"op": str(op), "after": {"id": str(key)}, "source": {"lsn": int(lsn)}}:
                pass
            case _:
                return None
        return change_id(key, lsn, op) if UUID.fullmatch(key) else None


def change_id(key: str, lsn: int, op: str) -> str:
    """The id of a change."""
    digest = hashlib.md5(f"{TABLE}|{key}|{lsn}|{op}|".encode(), usedforsecurity=False)
    return str(uuid.UUID(digest.hexdigest()))
