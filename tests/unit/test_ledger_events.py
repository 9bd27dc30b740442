"""The ledger's events: what their readers rely on, and what the service makes of an account and a transfer."""

from __future__ import annotations

import json
import runpy
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from outbox import Event, Failure
from outbox_lab.testing import check_events

from service import events
from service.ledger import BALANCE_MAX_MINOR, BALANCE_MIN_MINOR, Account
from service.schemas import Transfer

EVENTS = Path(__file__).parents[2] / "connect" / "events"
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


def example(name: str) -> dict[str, Any]:
    """The example that the declaration of an event has."""
    aggregate, _, rest = name.partition(".")
    [found] = json.loads((EVENTS / aggregate / f"{rest}.schema.json").read_text())["examples"]
    assert isinstance(found, dict)
    return found


def event(name: str, payload: dict[str, Any]) -> Event:
    """An event of this name, such as account.opened.v2."""
    aggregate, type_, version = name.split(".")
    return Event(aggregate, example(name)["account_id"], type_, payload, int(version.removeprefix("v")))


def refusal(event: Event) -> str | None:
    """The code by which an event is refused; None if it is valid."""
    try:
        check_events(event)
    except Failure as failure:
        return failure.code
    return None


def name_of(event: Event) -> str:
    """The name of an event."""
    return f"{event.aggregatetype}.{event.type}.v{event.schema_version}"


def test_the_declared_events() -> None:
    files = [file for name in ("account", "balance") for file in (EVENTS / name).glob("*.schema.json")]
    names = {f"{file.parent.name}.{file.name.removesuffix('.schema.json')}" for file in files}
    assert names == set(REQUIRED)


@pytest.mark.parametrize("name", REQUIRED)
def test_each_required_property_is_required(name: str) -> None:
    valid = example(name)
    check_events(event(name, valid), event(name, {**valid, "later": 1}))  # a property of later
    without = {missing: {key: value for key, value in valid.items() if key != missing} for missing in valid}
    refused = {missing: refusal(event(name, payload)) for missing, payload in without.items()}
    assert refused == {missing: "event-invalid" if missing in REQUIRED[name] else None for missing in valid}


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
    [changed] = change
    with pytest.raises(Failure, match=changed) as failed:
        check_events(event(name, {**example(name), **change}))
    assert failed.value.code == "event-invalid"


def test_accounts_of_version_1_have_an_empty_label() -> None:
    upcast = runpy.run_path(str(EVENTS / "account" / "upcast.py"))["opened_v1"]
    first = example("account.opened.v1")
    check_events(event("account.opened.v2", upcast(first)))
    assert upcast(first) == {**first, "label": ""}


def test_the_events_of_a_life_are_valid() -> None:
    frozen = ACCOUNT.frozen()
    made = [
        events.opened(ACCOUNT, "rent", AT),
        events.frozen(frozen, "court order", AT),
        events.closed(frozen.closed(), AT),
    ]
    assert [name_of(event) for event in made] == ["account.opened.v2", "account.frozen.v1", "account.closed.v1"]
    assert [event.payload.version for event in made] == [1, 2, 3]
    assert {event.aggregateid for event in made} == {str(ACCOUNT.id)}
    check_events(*made)


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
    assert [name_of(event) for event in (debited, credited)] == ["balance.debited.v1", "balance.credited.v1"]
    check_events(debited, credited)
    assert debited.payload.amount == -credited.payload.amount == -BALANCE_MAX_MINOR
