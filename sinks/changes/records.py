"""A change of an account, as Debezium reports it: the row before and after, the operation, and its place in the log.

A change has no id. Table, primary key, LSN and operation distinguish changes, so an id is derived from these four.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outbox.sinks import UUID, Column, DecodedEvent, Record, RecordDecoder, Rejection, load_schema, parse_json

CHANGE = "account.change"  # the name of these events; no service has declared them
SCHEMA = Path(__file__).with_name("account-change.schema.json")
COLUMNS = (
    Column("table_name", "text", is_nullable=False),
    Column("account_id", "uuid", is_nullable=False),  # the row's primary key
    Column("op", "text", is_nullable=False),  # r: of a snapshot; c, u, d: inserted, updated, deleted
    Column("lsn", "bigint", is_nullable=False),  # place in the log; of a snapshot's rows, where it was taken
    Column("currency", "text", is_nullable=True),  # the rest is the row afterwards; NULL if it was deleted
    Column("balance_minor", "bigint", is_nullable=True),  # minor units
    Column("version", "bigint", is_nullable=True),  # how many transfers have changed the account
)
STATE = ("currency", "balance_minor", "version")
OPERATIONS = {"r", "c", "u", "d"}


class ChangeDecoder(RecordDecoder):
    """Decodes changes of the table ``accounts`` by the JSON Schema of Debezium's envelope."""

    key = "account_id"
    version = "version"
    types = MappingProxyType({CHANGE: COLUMNS})

    def __init__(self) -> None:
        self._schema = load_schema(SCHEMA)

    def record(self, record: Record) -> DecodedEvent | Rejection:
        """The change of a record, or why it was rejected. The record's key must be that of its row."""
        change, rejection = parse_json(record.value)
        if rejection is not None:
            return rejection
        violation = self._schema.violation(change)
        if violation is not None:
            return Rejection("schema violation", violation.detail)
        row = _row(change)
        key, rejection = parse_json(record.key)
        if rejection is not None or not isinstance(key, dict) or key.get("id") != row["id"]:
            return Rejection("key mismatch", "the record's key is not that of its row")
        source, op = change["source"], change["op"]
        lsn = int(source["lsn"])
        state = [None if op == "d" else row[name] for name in STATE]
        numbers = [None if number is None else int(number) for number in state[1:]]
        return DecodedEvent(
            _id(source["table"], row["id"], lsn, op), (source["table"], row["id"], op, lsn, state[0], *numbers), CHANGE
        )

    def event_id(self, record: Record) -> str | None:
        """The id of a change whose record says table, key, LSN and operation, valid or not."""
        change, rejection = parse_json(record.value)
        if rejection is not None or not isinstance(change, dict):
            return None
        source, op = change.get("source"), change.get("op")
        row = _row(change)
        if not isinstance(source, dict) or op not in OPERATIONS or not UUID.fullmatch(str(row.get("id"))):
            return None
        lsn = source.get("lsn")
        if source.get("table") != "accounts" or not isinstance(lsn, int) or lsn < 0:
            return None
        return _id("accounts", row["id"], lsn, str(op))


def _row(change: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row that a change is about; empty if the change does not say."""
    row = change.get("before" if change.get("op") == "d" else "after")
    return row if isinstance(row, dict) else {}


def _id(table: str, key: str, lsn: int, op: str) -> str:
    digest = hashlib.md5(f"{table}|{key}|{lsn}|{op}|".encode(), usedforsecurity=False)
    return str(uuid.UUID(digest.hexdigest()))
