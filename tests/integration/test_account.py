"""Accounts: opened, frozen and closed; each change once, with its event, and refused by a reason."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable

import pytest
from flask import Flask
from outbox import Event, Settings
from outbox_lab.testing import all_at_once, check_events, query
from werkzeug.test import TestResponse

from tests.ledger import Client, audit, refused, written

CLIENTS = 8
TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"

Change = Callable[[Client, str], TestResponse]
CHANGES: dict[str, Change] = {"freeze": lambda client, account: client.freeze(account), "close": Client.close}
changes = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


def names(settings: Settings) -> list[str]:
    """The names of the account events, the oldest first."""
    return [one.name for one in written(settings, "account")]


def test_an_account_is_opened_with_one_event(client: Client, databases: Settings) -> None:
    response = client.post(
        "/accounts", {"currency": "EUR", "label": "rent é"}, Idempotency_Key="k", traceparent=TRACEPARENT
    )
    assert response.status_code == 201
    opened = response.get_json()
    assert {name: opened[name] for name in ("kind", "currency", "label", "status", "balance", "version")} == {
        "kind": "user",
        "currency": "EUR",
        "label": "rent é",
        "status": "open",
        "balance": 0,
        "version": 0,
    }
    assert response.headers["Location"] == f"/accounts/{opened['id']}"
    assert client.get(response.headers["Location"]).get_json() == opened
    [event] = written(databases)
    assert (event.name, event.key, event.traceparent) == ("account.opened.v2", opened["id"], TRACEPARENT)
    assert event.payload == {
        "account_id": opened["id"],
        "kind": "user",
        "currency": "EUR",
        "label": "rent é",
        "version": 1,
        "occurred_at": opened["created_at"],
    }
    assert audit(databases) == {}


def test_an_account_without_a_label_is_opened_with_an_empty_one(client: Client, databases: Settings) -> None:
    client.post("/accounts", {"currency": "EUR"}, Idempotency_Key="k")
    assert [one.payload["label"] for one in written(databases)] == [""]


def test_an_account_is_frozen_with_a_reason(client: Client, databases: Settings) -> None:
    account = client.open()
    response = client.freeze(account, "fraud")
    assert (response.status_code, response.get_json()["status"]) == (200, "frozen")
    assert client.get(f"/accounts/{account}").get_json()["status"] == "frozen"
    event = written(databases)[-1]
    assert (event.name, event.key) == ("account.frozen.v1", account)
    assert {name: event.payload[name] for name in ("reason", "version", "occurred_at")} == {
        "reason": "fraud",
        "version": 2,
        "occurred_at": response.get_json()["changed_at"],
    }
    assert audit(databases) == {}


@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_empty_account_is_closed(client: Client, databases: Settings, is_frozen: bool) -> None:
    account = client.open()
    if is_frozen:
        client.freeze(account)
    response = client.close(account, traceparent=TRACEPARENT)
    assert (response.status_code, response.get_json()["status"]) == (200, "closed")
    event = written(databases)[-1]
    assert (event.name, event.key, event.traceparent) == ("account.closed.v1", account, TRACEPARENT)
    assert event.payload["version"] == 2 + is_frozen
    assert audit(databases) == {}


def test_every_event_is_valid_by_its_declaration(client: Client, databases: Settings) -> None:
    user = client.open(label="x" * 100)
    bank = client.fund(user, 2**63 - 1)
    client.transfer(user, bank, 2**63 - 1)
    client.freeze(user, "x" * 200)
    client.close(user)
    found = written(databases)
    assert {one.name for one in found} == {
        "account.opened.v2",
        "account.frozen.v1",
        "account.closed.v1",
        "balance.debited.v1",
        "balance.credited.v1",
    }
    for one in found:
        aggregate, type_, version = one.declaration
        check_events(Event(aggregate, one.key, type_, one.payload, version))


# Refusals -----------------------------------------------------------------------------------------------------------


@changes
def test_an_unknown_account_is_404(client: Client, databases: Settings, change: Change) -> None:
    refused(change(client, str(uuid.uuid4())), 404, "unknown-account")
    assert written(databases) == []


def test_a_frozen_account_is_not_frozen_again(client: Client, databases: Settings) -> None:
    account = client.open()
    client.freeze(account)
    refused(client.freeze(account), 409, "account-frozen")
    assert names(databases) == ["account.opened.v2", "account.frozen.v1"]


@changes
def test_a_closed_account_does_not_change(client: Client, databases: Settings, change: Change) -> None:
    account = client.open()
    client.close(account)
    refused(change(client, account), 409, "account-closed")
    assert names(databases) == ["account.opened.v2", "account.closed.v1"]


def test_an_account_with_money_or_debts_is_not_closed(client: Client, databases: Settings) -> None:
    account = client.open()
    bank = client.fund(account, 1)
    for each in (account, bank):
        refused(client.close(each), 409, "balance-not-zero")
    assert client.transfer(account, bank, 1).status_code == 201
    assert client.close(account).status_code == 200
    assert audit(databases) == {}


@pytest.mark.parametrize("status", ["frozen", "closed"])
def test_no_transfer_from_or_to_an_account_that_is_not_open(client: Client, databases: Settings, status: str) -> None:
    bank, account = client.open("system"), client.open("system")
    assert (client.freeze if status == "frozen" else client.close)(account).status_code == 200
    refused(client.transfer(bank, account, 1), 409, f"account-{status}")
    refused(client.transfer(account, bank, 1), 409, f"account-{status}")
    assert written(databases, "balance") == []
    assert audit(databases) == {}


@pytest.mark.parametrize(
    "body",
    [{}, {"reason": ""}, {"reason": "x" * 201}, {"reason": None}, {"reason": "a\0b"}, {"reason": "a", "by": "me"}],
)
def test_an_invalid_reason_is_422(client: Client, body: dict[str, object]) -> None:
    response = client.post(f"/accounts/{client.open()}/freeze", body, Idempotency_Key="k")
    assert response.status_code == 422


# Repetitions --------------------------------------------------------------------------------------------------------


def test_a_repeated_opening_opens_one_account(client: Client, databases: Settings) -> None:
    body = {"currency": "EUR", "label": "rent"}
    first, second = (client.post("/accounts", body, Idempotency_Key="k") for _ in range(2))
    assert (first.status_code, first.data, first.headers["Location"]) == (
        second.status_code,
        second.data,
        second.headers["Location"],
    )
    refused(client.post("/accounts", {**body, "label": ""}, Idempotency_Key="k"), 409, "idempotency-key-reused")
    assert query(databases, "SELECT label FROM accounts") == [("rent",)]
    assert names(databases) == ["account.opened.v2"]


def test_a_repeated_freeze_is_made_once(client: Client, databases: Settings) -> None:
    account = client.open()
    first, second = (client.freeze(account, key="k") for _ in range(2))
    assert (first.status_code, first.data) == (second.status_code, second.data) == (200, first.data)
    refused(client.freeze(account, "another reason", key="k"), 409, "idempotency-key-reused")
    assert names(databases) == ["account.opened.v2", "account.frozen.v1"]


@pytest.mark.parametrize("which", ["freeze", "close"])
def test_a_key_is_for_one_account(client: Client, databases: Settings, which: str) -> None:
    change = getattr(client, which)
    assert change(client.open(), key="k").status_code == 200
    refused(change(client.open(), key="k"), 409, "idempotency-key-reused")
    assert len(written(databases)) == 3


def test_a_refusal_is_repeated_after_the_balance_is_zero(client: Client) -> None:
    account = client.open()
    bank = client.fund(account, 1)
    first = client.close(account, key="k")
    refused(first, 409, "balance-not-zero")
    client.transfer(account, bank, 1)
    second = client.close(account, key="k")
    assert (first.status_code, first.data) == (second.status_code, second.data)
    assert client.close(account).status_code == 200


# At the same moment -------------------------------------------------------------------------------------------------


def test_of_freezes_at_once_one_is_made(app: Flask, client: Client, databases: Settings) -> None:
    account = client.open()
    answers = all_at_once(CLIENTS, lambda _: Client(app, databases).freeze(account).status_code)
    assert Counter(answers) == {200: 1, 409: CLIENTS - 1}
    assert audit(databases) == {}


def test_no_money_comes_to_an_account_while_it_is_closed(app: Flask, client: Client, databases: Settings) -> None:
    bank = client.open("system")
    for account in [client.open() for _ in range(10)]:

        def act(number: int, account: str = account) -> int:
            mine = Client(app, databases)
            return (mine.close(account) if number == 0 else mine.transfer(bank, account, 1)).status_code

        assert set(all_at_once(CLIENTS, act)) <= {200, 201, 409}
    assert audit(databases) == {}


# Accounts from before -----------------------------------------------------------------------------------------------


def test_the_first_event_of_an_account_from_before_has_version_1(client: Client, databases: Settings) -> None:
    query(databases, "INSERT INTO accounts (id, kind, currency) VALUES (gen_random_uuid(), 'user', 'EUR')")
    [(account,)] = query(databases, "SELECT id::text FROM accounts")
    assert client.get(f"/accounts/{account}").get_json()["label"] == ""
    assert client.freeze(account).status_code == 200
    assert [(one.name, one.payload["version"]) for one in written(databases)] == [("account.frozen.v1", 1)]
    assert audit(databases) == {}
