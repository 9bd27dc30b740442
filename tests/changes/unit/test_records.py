"""What is wrong with the record of a change."""

from __future__ import annotations

import pytest
from outbox.events.schema import Rejection
from outbox.sink.records import DecodedEvent, Record, Skipped

from sinks.changes.records import CHANGE, ChangeDecoder
from tests.changes.change_log import CASES, DELETED, UPDATED

DECODER = ChangeDecoder()


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
