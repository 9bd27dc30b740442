"""Errors in the record of a change."""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import dataclass, replace
from typing import Any

import pytest
from outbox.sinks import DecodedEvent, Record, Rejection, Skipped

from sinks.changes.records import CHANGE, ChangeDecoder

DECODER = ChangeDecoder()


def nth_key(number: int) -> str:
    """The n-th account."""
    return str(uuid.UUID(int=number))


@dataclass(frozen=True)
class Change:
    """A change of a row; of a deletion the state is not told."""

    account_id: str
    op: str
    lsn: int
    balance_minor: int | None = None
    version: int | None = None
    currency: str | None = "EUR"
    table_name: str = "accounts"

    @property
    def event_id(self) -> str:
        """The id that the sink gives it."""
        text = f"{self.table_name}|{self.account_id}|{self.lsn}|{self.op}|"
        return str(uuid.UUID(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()))

    def record(self, **changes: Any) -> tuple[bytes, bytes]:
        """Key and value as Debezium writes them; of a deletion it makes up what the log does not have.

        ``changes`` are columns of the row to be other than they should be.
        """
        row: dict[str, Any] = {
            "id": self.account_id,
            "kind": "user",
            "currency": self.currency,
            "created_at": "2026-11-21T05:00:00Z",
        }
        row |= {"label": "rent", "status": "open", "account_version": 1}
        state = {**row, "balance_minor": self.balance_minor, "version": self.version, **changes}
        made_up = {"id": self.account_id, "kind": "", "currency": "", "balance_minor": 0, "version": 0}
        envelope = {
            "before": made_up if self.op == "d" else None,
            "after": None if self.op == "d" else state,
            "source": {"schema": "public", "table": self.table_name, "lsn": self.lsn, "snapshot": "false"},
            "op": self.op,
            "ts_ms": 1_795_273_008_225,
        }
        return json.dumps({"id": self.account_id}).encode(), json.dumps(envelope).encode()


UPDATED = Change(nth_key(7), "u", 4096, balance_minor=-(2**63), version=2**63 - 1)
DELETED = Change(nth_key(7), "d", 4104, currency=None)


def _with(change: Change, old: str, new: str, key: bytes | None = None) -> tuple[bytes, bytes]:
    """Its record, one thing in the value's text replaced, or another key."""
    own_key, value = change.record()
    assert old.encode() in value
    return own_key if key is None else key, value.replace(old.encode(), new.encode())


# Records by what is the matter, and the fault that is found; None if nothing is.
CASES: dict[str, tuple[tuple[bytes | None, bytes | None], str | None]] = {
    "an update": (UPDATED.record(), None),
    "a deletion": (DELETED.record(), None),
    "a row of a snapshot": (replace(UPDATED, op="r").record(), None),
    "a new row": (replace(UPDATED, op="c", version=0).record(), None),
    "a column that came later": (UPDATED.record(nickname="é"), None),
    "a tombstone": ((UPDATED.record()[0], None), "no value"),
    "no JSON": ((UPDATED.record()[0], b"{"), "not JSON"),
    "something behind it": (_with(UPDATED, '"ts_ms": 1795273008225}', '"ts_ms": 1} {}'), "not JSON"),
    "no text": ((UPDATED.record()[0], b"\xff"), "not UTF-8"),
    "no object": ((UPDATED.record()[0], b"[]"), "schema violation"),
    "no op": (_with(UPDATED, '"op"', '"o"'), "schema violation"),
    "another op": (replace(UPDATED, op="t").record(), "schema violation"),
    "another table": (replace(UPDATED, table_name="transfers").record(), "schema violation"),
    "no lsn": (_with(UPDATED, '"lsn"', '"l"'), "schema violation"),
    "an lsn as text": (_with(UPDATED, "4096", '"4096"'), "schema violation"),
    "a negative lsn": (replace(UPDATED, lsn=-1).record(), "schema violation"),
    "an lsn beyond 64 bits": (replace(UPDATED, lsn=2**63).record(), "schema violation"),
    "no row": (_with(UPDATED, '"after"', '"later"'), "schema violation"),
    "no version": (_with(UPDATED, '"version"', '"v"'), "schema violation"),
    "a version that is null": (UPDATED.record(version=None), "schema violation"),
    "a negative version": (UPDATED.record(version=-1), "schema violation"),
    "a version as text": (UPDATED.record(version="1"), "schema violation"),
    "a balance beyond 64 bits": (UPDATED.record(balance_minor=2**63), "schema violation"),
    "a balance with a fraction": (UPDATED.record(balance_minor=0.5), "schema violation"),
    "no currency": (UPDATED.record(currency=None), "schema violation"),
    "a currency as a number": (UPDATED.record(currency=123), "schema violation"),
    "a currency and a line end": (UPDATED.record(currency="EUR\n"), "schema violation"),
    "an id that is not a UUID": (UPDATED.record(id="7"), "schema violation"),
    "a deletion of nothing": (_with(DELETED, '"before"', '"b"'), "schema violation"),
    "another key": (_with(UPDATED, '"op"', '"op"', Change(nth_key(8), "u", 1).record()[0]), "key mismatch"),
    "a key that is no JSON": ((nth_key(7).encode(), UPDATED.record()[1]), "key mismatch"),
    "a key and more": ((UPDATED.record()[0] + b"{}", UPDATED.record()[1]), "key mismatch"),
    "no key": ((None, UPDATED.record()[1]), "key mismatch"),
}


def decoded(key: bytes | None, value: bytes | None) -> DecodedEvent | Rejection | Skipped:
    return DECODER.record(Record(key, [], value, 0))


@pytest.mark.parametrize("name", CASES)
def test_the_fault_of_a_record_is_found(name: str) -> None:
    record, reason = CASES[name]
    found = decoded(*record)
    assert (found.reason if isinstance(found, Rejection) else None) == reason


def test_a_valid_change_has_the_columns_of_the_batch() -> None:
    found = decoded(*UPDATED.record())
    assert isinstance(found, DecodedEvent)
    assert found.event_id == UPDATED.event_id
    assert dict(zip((column.name for column in DECODER.types[CHANGE]), found.values, strict=True)) == {
        "table_name": "accounts",
        "account_id": UPDATED.account_id,
        "op": "u",
        "lsn": UPDATED.lsn,
        "currency": "EUR",
        "balance_minor": UPDATED.balance_minor,
        "version": UPDATED.version,
    }


def test_made_up_columns_of_a_deletion_are_left_out() -> None:
    key, value = DELETED.record()
    assert b'"balance_minor": 0' in value
    found = decoded(key, value)
    assert isinstance(found, DecodedEvent)
    assert found.values[2:] == ("d", DELETED.lsn, None, None, None)


def test_an_invalid_change_has_the_id_of_its_change() -> None:
    key, value = UPDATED.record(version=None)
    assert DECODER.event_id(Record(key, [], value, 0)) == UPDATED.event_id
    assert DECODER.event_id(Record(key, [], b"{", 0)) is None
