"""The ledger's event: a change of its schema breaks no reader."""

from __future__ import annotations

from typing import Any

import pytest

from outbox.base.errors import Failure
from outbox.writing.contract import EventSchema
from tests.support.events import SHAPE

VALUE: dict[str, Any] = {
    "transfer_id": "6f1f3c6e-0f53-4d0b-9b0e-0d2c6a3a7c11",
    "account_id": "01a1fc75-167d-7239-af57-d1ee1a62e0a6",
    "amount": -1250,
    "currency": "EUR",
    "balance_after": 0,
    "version": 1,
    "occurred_at": "2026-11-21T10:00:00.123456Z",
}


@pytest.fixture(scope="module")
def contract() -> EventSchema:
    return EventSchema(SHAPE.schema_file)


def test_version_1_stays_what_readers_rely_on(contract: EventSchema) -> None:
    """A failure here is a broken reader somewhere: add an optional property, or write a version 2 beside this one."""
    assert contract.document["additionalProperties"] is True
    assert set(contract.document["required"]) == set(VALUE)
    types = {name: contract.document["properties"][name]["type"] for name in VALUE}
    assert types == {name: "integer" if isinstance(value, int) else "string" for name, value in VALUE.items()}
    for name in VALUE:
        with pytest.raises(Failure, match=rf"\$\.{name}\b"):
            contract.check_value({other: value for other, value in VALUE.items() if other != name})
    assert (contract.event_types, contract.schema_version) == (["transfer.debited", "transfer.credited"], 1)
