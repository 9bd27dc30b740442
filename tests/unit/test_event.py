"""The contract of the events, and that a change of its file breaks no reader."""

from __future__ import annotations

import re
from typing import Any

import pytest

from outbox.base.errors import Failure
from outbox.writing.contract import Contract
from tests.paths import SCHEMA_FILE

VALUE: dict[str, Any] = {
    "transfer_id": "6f1f3c6e-0f53-4d0b-9b0e-0d2c6a3a7c11",
    "account_id": "01a1fc75-167d-7239-af57-d1ee1a62e0a6",
    "amount": -1250,
    "currency": "EUR",
    "balance_after": 0,
    "version": 1,
    "occurred_at": "2026-11-21T10:00:00.123456Z",
}
HEADERS: dict[str, str | None] = {
    "id": "01a1fc75-167d-7239-af57-d1ee1a62e0a6",
    "eventType": "transfer.debited",
    "schemaVersion": "1",
}


@pytest.fixture(scope="module")
def contract() -> Contract:
    return Contract(SCHEMA_FILE)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"amount": 2**63 - 1, "balance_after": -(2**63), "version": 2**63 - 1},
        {"occurred_at": "2026-11-21T10:00:00Z"},
        {"note": "a property of a later writer", "parts": [1, 2]},
    ],
)
def test_an_event_as_the_service_writes_it_or_a_later_one_with_more_is_valid(
    contract: Contract, change: dict[str, Any]
) -> None:
    contract.check_value({**VALUE, **change})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transfer_id", "6f1f3c6e"),
        ("transfer_id", None),
        ("account_id", VALUE["account_id"].upper()),
        ("account_id", VALUE["account_id"] + "\n"),
        ("amount", 0),
        ("amount", 2**63),
        ("amount", 1.5),
        ("amount", "1"),
        ("amount", True),
        ("currency", "eur"),
        ("currency", "EUR\n"),
        ("balance_after", -(2**63) - 1),
        ("version", 0),
        ("occurred_at", "2026-11-21 10:00:00"),
        ("occurred_at", "2026-11-21T10:00:00+01:00"),
    ],
)
def test_a_wrong_value_is_named(contract: Contract, name: str, value: object) -> None:
    with pytest.raises(Failure, match=re.escape(f"$.{name}")):
        contract.check_value({**VALUE, name: value})


@pytest.mark.parametrize("value", [None, [], "text", 1])
def test_a_value_that_is_no_object_is_refused(contract: Contract, value: object) -> None:
    with pytest.raises(Failure):
        contract.check_value(value)


def test_headers_may_be_more_and_the_trace_may_be_absent_or_null(contract: Contract) -> None:
    contract.check_headers(HEADERS)
    contract.check_headers({**HEADERS, "traceparent": None, "more": "x"})


@pytest.mark.parametrize(("name", "value"), [("id", "1"), ("eventType", "transfer.made"), ("schemaVersion", "2")])
def test_a_wrong_header_is_named(contract: Contract, name: str, value: str) -> None:
    with pytest.raises(Failure, match=re.escape(f"$.{name}")):
        contract.check_headers({**HEADERS, name: value})


def test_version_1_stays_what_readers_rely_on(contract: Contract) -> None:
    """A failure here is a broken reader somewhere: add an optional property, or write a version 2 beside this one."""
    assert contract.schema["additionalProperties"] is True
    assert set(contract.schema["required"]) == set(VALUE)
    types = {name: contract.schema["properties"][name]["type"] for name in VALUE}
    assert types == {name: "integer" if isinstance(value, int) else "string" for name, value in VALUE.items()}
    for name in VALUE:
        with pytest.raises(Failure, match=f"'{name}' is a required property"):
            contract.check_value({other: value for other, value in VALUE.items() if other != name})
    assert (contract.event_types, contract.schema_version) == (["transfer.debited", "transfer.credited"], 1)
