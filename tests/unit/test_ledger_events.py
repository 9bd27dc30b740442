"""The ledger's events: what their readers rely on, and what the service makes of an account and a transfer."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from outbox.base.settings import load
from outbox.events import catalog
from outbox.events.schema import EventSchema
from outbox.writing.append import Event

from service import events
from service.ledger import BALANCE_MAX_MINOR, BALANCE_MIN_MINOR, Account
from service.schemas import Transfer

SETTINGS = load(environment=False)
CATALOG = catalog.of(SETTINGS)
SCHEMAS = {schema.name: schema for schema in CATALOG.schemas}
# What the readers of each version rely on. A failure here is a broken reader somewhere: add an optional property, or
# write a new version beside the old one (docs/events.md).
REQUIRED = {
    "account.opened.v1": {"account_id", "kind", "currency", "version", "occurred_at"},
    "account.opened.v2": {"account_id", "kind", "currency", "label", "version", "occurred_at"},
    "account.frozen.v1": {"account_id", "reason", "version", "occurred_at"},
    "account.closed.v1": {"account_id", "version", "occurred_at"},
    "balance.debited.v1": {
        "transfer_id",
        "account_id",
        "amount",
        "currency",
        "balance_after",
        "version",
        "occurred_at",
    },
}
REQUIRED["balance.credited.v1"] = REQUIRED["balance.debited.v1"]

AT = datetime(2026, 11, 21, 10, tzinfo=UTC)
ACCOUNT = Account(uuid.uuid4(), "user", "EUR")


def test_the_declared_events() -> None:
    assert set(SCHEMAS) == set(REQUIRED)
    assert {name: one.topic for name, one in CATALOG.aggregates.items()} == {
        "account": f"{SETTINGS.topic_prefix}.account",
        "balance": f"{SETTINGS.topic_prefix}.balance",
    }


@pytest.mark.parametrize("name", REQUIRED)
def test_each_required_property_is_required(name: str) -> None:
    schema = SCHEMAS[name]
    [example] = schema.examples
    assert schema.violation(example) is None
    assert schema.violation({**example, "later": 1}) is None, "a property of later"
    for missing in example:
        violation = schema.violation({key: value for key, value in example.items() if key != missing})
        assert (violation is not None) is (missing in REQUIRED[name]), missing


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("account.opened.v2", {"label": "x" * 101}),
        ("account.opened.v2", {"kind": "root"}),
        ("account.frozen.v1", {"reason": ""}),
        ("account.closed.v1", {"version": 0}),
        ("balance.debited.v1", {"amount": 0}),
        ("balance.debited.v1", {"amount": 1}),
        ("balance.credited.v1", {"amount": -1}),
        ("balance.credited.v1", {"currency": "euro"}),
        ("balance.credited.v1", {"occurred_at": "2026-11-21 10:00:00"}),
    ],
)
def test_what_no_reader_expects_is_invalid(name: str, change: dict[str, Any]) -> None:
    violation = SCHEMAS[name].violation({**SCHEMAS[name].examples[0], **change})
    assert violation is not None
    assert violation.name == next(iter(change))


def test_accounts_of_version_1_have_an_empty_label() -> None:
    [opened] = CATALOG.wanted(["account.opened"])
    assert opened.schema is SCHEMAS["account.opened.v2"]
    schema, upcaster = opened.accepts[1]
    assert upcaster is not None
    assert upcaster.upcast(schema.examples[0]) == {**schema.examples[0], "label": ""}


def declared(event: Event) -> EventSchema:
    """The declaration of an event. Raises Failure if there is none."""
    return CATALOG.schema(event.aggregatetype, event.type, event.schema_version)


def test_the_events_of_a_life_are_valid() -> None:
    frozen = ACCOUNT.frozen()
    made = [
        events.opened(ACCOUNT, "rent", AT),
        events.frozen(frozen, "court order", AT),
        events.closed(frozen.closed(), AT),
    ]
    assert [declared(event).name for event in made] == ["account.opened.v2", "account.frozen.v1", "account.closed.v1"]
    assert [event.payload["version"] for event in made] == [1, 2, 3]
    for event in made:
        declared(event).require_valid(event.payload)
        assert event.aggregateid == event.payload["account_id"] == str(ACCOUNT.id)


def test_the_events_of_the_largest_transfer_are_valid() -> None:
    source = Account(uuid.uuid4(), "system", "EUR", BALANCE_MIN_MINOR, 1)
    target = Account(uuid.uuid4(), "system", "EUR", BALANCE_MAX_MINOR, 1)
    made = Transfer(
        id=uuid.uuid4(),
        from_account=source.id,
        to_account=target.id,
        amount=BALANCE_MAX_MINOR,
        currency="EUR",
        created_at=AT,
    )
    debited, credited = events.transferred(made, (source, target))
    for event, name in ((debited, "balance.debited.v1"), (credited, "balance.credited.v1")):
        assert declared(event).name == name
        declared(event).require_valid(event.payload)
    assert debited.payload["amount"] == -credited.payload["amount"] == -BALANCE_MAX_MINOR
