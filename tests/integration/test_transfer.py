"""Transfers: correct one by one, at the limits, repeated, and all at once."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator

import pytest
from flask import Flask
from outbox import Settings
from outbox_lab.testing import all_at_once, chosen_seed, query, seeded
from sqlalchemy import Engine, event

from service.ledger import BALANCE_MAX_MINOR
from tests.ledger import Client, audit, refused, written

CLIENTS = 8
TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


def test_a_transfer_moves_the_money_and_writes_two_events(client: Client, databases: Settings) -> None:
    user = client.open()
    bank = client.fund(user, 500)
    response = client.transfer(user, bank, 120)
    assert response.status_code == 201
    made = response.get_json()
    assert {name: made[name] for name in ("from_account", "to_account", "amount", "currency")} == {
        "from_account": user,
        "to_account": bank,
        "amount": 120,
        "currency": "EUR",
    }
    assert client.get(response.headers["Location"]).get_json() == made
    assert (client.balance(user), client.balance(bank)) == (380, -380)

    debit, credit = written(databases, "balance")[-2:]
    for one in (debit, credit):
        assert one.key == one.payload["account_id"]
        assert (one.payload["transfer_id"], one.payload["occurred_at"]) == (made["id"], made["created_at"])
    assert (debit.name, debit.key) == ("balance.debited.v1", user)
    assert {name: debit.payload[name] for name in ("amount", "balance_after", "version")} == {
        "amount": -120,
        "balance_after": 380,
        "version": 2,
    }
    assert (credit.name, credit.key) == ("balance.credited.v1", bank)
    assert {name: credit.payload[name] for name in ("amount", "balance_after", "version")} == {
        "amount": 120,
        "balance_after": -380,
        "version": 2,
    }
    assert audit(databases) == {}


def test_traceparent_of_the_request_is_in_its_events(client: Client, databases: Settings) -> None:
    user = client.open()
    bank = client.fund(user, 10)
    client.transfer(user, bank, 1, traceparent=TRACEPARENT)
    client.transfer(user, bank, 1, traceparent="nonsense")
    traced = [one.traceparent for one in written(databases, "balance")]
    assert traced == [None, None, TRACEPARENT, TRACEPARENT, None, None]


# Refusals -----------------------------------------------------------------------------------------------------------


def test_more_than_a_user_has_is_409_and_writes_nothing(client: Client, databases: Settings) -> None:
    user = client.open()
    bank = client.fund(user, 10)
    refused(client.transfer(user, bank, 11), 409, "insufficient-funds")
    assert client.balance(user) == 10
    assert len(written(databases, "balance")) == 2
    assert audit(databases) == {}


def test_a_balance_beyond_64_bits_is_409(client: Client, databases: Settings) -> None:
    user = client.open()
    client.fund(user, BALANCE_MAX_MINOR)
    bank = client.open("system")
    refused(client.transfer(bank, user, 1), 409, "balance-out-of-range")
    other = client.open()
    assert client.transfer(bank, other, BALANCE_MAX_MINOR).status_code == 201
    third = client.open()
    assert client.transfer(bank, third, 1).status_code == 201  # the bank is at the smallest 64-bit integer now
    refused(client.transfer(bank, third, 1), 409, "balance-out-of-range")
    assert audit(databases) == {}


def test_another_currency_is_409(client: Client) -> None:
    euro, dollar = client.open("system", "EUR"), client.open("system", "USD")
    refused(client.transfer(euro, dollar, 1), 409, "currency-mismatch")


def test_an_account_or_transfer_that_is_not_there_is_404(client: Client) -> None:
    known, unknown = client.open("system"), str(uuid.uuid4())
    for source, target in ((known, unknown), (unknown, known)):
        response = client.transfer(source, target, 1)
        refused(response, 404, "unknown-account")
        assert unknown in response.text
    for path in (f"/accounts/{unknown}", f"/transfers/{unknown}"):
        assert client.get(path).status_code == 404


# Repetitions --------------------------------------------------------------------------------------------------------


def test_the_same_key_and_body_give_the_first_answer_again(client: Client, databases: Settings) -> None:
    user = client.open()
    bank = client.fund(user, 100)
    first, second = (client.transfer(user, bank, 60, key="k") for _ in range(2))
    assert (first.status_code, first.data, first.headers["Location"]) == (
        second.status_code,
        second.data,
        second.headers["Location"],
    )
    assert client.balance(user) == 40
    assert audit(databases) == {}


def test_a_refusal_is_repeated_too_though_there_are_funds_by_now(client: Client) -> None:
    user, bank = client.open(), client.open("system")
    first = client.transfer(user, bank, 60, key="k")
    refused(first, 409, "insufficient-funds")
    client.transfer(bank, user, 100)
    second = client.transfer(user, bank, 60, key="k")
    assert (first.status_code, first.data) == (second.status_code, second.data)
    assert client.transfer(user, bank, 60, key="another").status_code == 201


def test_the_same_key_with_another_body_is_409(client: Client) -> None:
    user = client.open()
    bank = client.fund(user, 100)
    assert client.transfer(user, bank, 60, key="k").status_code == 201
    refused(client.transfer(user, bank, 61, key="k"), 409, "idempotency-key-reused")
    refused(client.transfer(bank, user, 60, key="k"), 409, "idempotency-key-reused")
    assert client.balance(user) == 40


def test_a_body_written_otherwise_is_the_same_body(client: Client) -> None:
    user = client.open()
    bank = client.fund(user, 100)
    first = client.transfer(user, bank, 60, key="k")
    body = {"amount": 60, "to_account": bank, "from_account": user}
    assert client.post("/transfers", body, Idempotency_Key="k").data == first.data


def test_an_invalid_request_does_not_use_its_key_up(client: Client) -> None:
    user = client.open()
    bank = client.fund(user, 100)
    assert client.transfer(user, bank, 0, key="k").status_code == 422
    assert client.transfer(user, bank, 60, key="k").status_code == 201


def test_an_expired_key_may_be_used_again(client: Client, databases: Settings) -> None:
    user = client.open()
    bank = client.fund(user, 100)
    assert client.transfer(user, bank, 60, key="k").status_code == 201
    query(databases, "UPDATE idempotency_keys SET expires_at = now() WHERE key = 'k'")
    assert client.transfer(user, bank, 1, key="k").status_code == 201
    refused(client.transfer(user, bank, 60, key="k"), 409, "idempotency-key-reused")
    assert client.balance(user) == 39


def test_a_key_is_remembered_as_long_as_the_setting_says(client: Client, databases: Settings) -> None:
    client.fund(client.open(), 1)
    assert query(
        databases, "SELECT DISTINCT round(extract(epoch FROM expires_at - now()) / 3600) FROM idempotency_keys"
    ) == [(databases.idempotency_ttl_hours,)]


def test_expired_keys_are_forgotten_as_new_ones_come(client: Client, databases: Settings) -> None:
    user = client.open()
    bank = client.fund(user, 100)
    for _ in range(8):
        client.transfer(user, bank, 1)
    query(databases, "UPDATE idempotency_keys SET expires_at = now()")
    for _ in range(6):
        client.transfer(user, bank, 1)
    assert query(databases, "SELECT count(*), count(*) FILTER (WHERE expires_at > now()) FROM idempotency_keys") == [
        (6, 6)
    ]


def test_of_requests_with_one_key_at_once_all_get_one_answer(app: Flask, client: Client, databases: Settings) -> None:
    user = client.open()
    bank = client.fund(user, 1000)
    clients = [Client(app, databases) for _ in range(CLIENTS)]
    for attempt in range(10):
        answers = all_at_once(CLIENTS, lambda number: clients[number].transfer(user, bank, 10, key=f"k{attempt}"))  # noqa: B023
        assert {answer.status_code for answer in answers} == {201}
        assert len({answer.data for answer in answers}) == 1
    assert client.balance(user) == 900
    assert audit(databases) == {}


def test_of_different_requests_with_one_key_at_once_one_is_made(
    app: Flask, client: Client, databases: Settings
) -> None:
    # Different accounts, so that nothing but the key brings them together.
    banks = [client.open("system") for _ in range(CLIENTS)]
    users = [client.open() for _ in range(CLIENTS)]
    clients = [Client(app, databases) for _ in range(CLIENTS)]
    for attempt in range(10):
        answers = all_at_once(CLIENTS, lambda n: clients[n].transfer(banks[n], users[n], 1, key=f"k{attempt}"))  # noqa: B023
        assert Counter(answer.status_code for answer in answers) == {201: 1, 409: CLIENTS - 1}
    assert sum(client.balance(user) for user in users) == 10
    assert audit(databases) == {}


# Everybody at once --------------------------------------------------------------------------------------------------


def test_opposite_transfers_neither_deadlock_nor_lose(app: Flask, client: Client, databases: Settings) -> None:
    one, other = client.open(), client.open()
    for account in (one, other):
        client.fund(account, 1000)
    seed = chosen_seed()

    def hammer(number: int) -> Counter[int]:
        mine, choose = Client(app, databases), seeded(seed, number)
        pairs = [(one, other), (other, one)]
        return Counter(mine.transfer(*choose.choice(pairs), choose.randint(1, 400)).status_code for _ in range(50))

    answered = sum(all_at_once(CLIENTS, hammer), Counter[int]())
    assert set(answered) <= {201, 409}, answered
    assert answered[201] > CLIENTS * 25, answered
    assert client.balance(one) + client.balance(other) == 2000
    assert len(written(databases, "balance")) == 2 * (answered[201] + 2)
    assert deadlocks(databases) == 0
    assert audit(databases) == {}


def test_clients_among_many_accounts_keep_the_books_right(app: Flask, client: Client, databases: Settings) -> None:
    accounts = [client.open() for _ in range(5)] + [client.open("system")]
    seed = chosen_seed()

    def pay(number: int) -> Counter[int]:
        mine, choose = Client(app, databases), seeded(seed, number)
        answered: Counter[int] = Counter()
        for _ in range(40):
            source, target = choose.sample(accounts, 2)
            key = f"{choose.randrange(200)}"  # keys are used twice and more, mostly for another transfer
            answered[mine.transfer(source, target, choose.randint(1, 100), key=key).status_code] += 1
        return answered

    answered = sum(all_at_once(CLIENTS, pay), Counter[int]())
    assert set(answered) == {201, 409}, answered
    assert deadlocks(databases) == 0
    assert audit(databases) == {}


def deadlocks(settings: Settings) -> int:
    """How many deadlocks the server has broken up in this database."""
    sql = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    return int(query(settings, sql)[0][0])


def test_the_audit_of_these_tests_finds_what_is_wrong(client: Client, databases: Settings) -> None:
    user, other = client.open(), client.open()
    client.fund(user, 100)
    client.transfer(user, other, 1)
    assert audit(databases) == {}
    for harm, found in {
        "UPDATE accounts SET balance_minor = balance_minor + 1 WHERE kind = 'user'": "money made or lost",
        "UPDATE accounts SET version = version + 1": "accounts that are not the sum of their events",
        "UPDATE accounts SET status = 'frozen' WHERE kind = 'user'": "accounts that are not as their latest event says",
        "DELETE FROM outbox WHERE type = 'debited'": "transfers without their two events",
        "UPDATE outbox SET payload = payload || '{\"version\": 9}'": "versions that are not 1, 2, 3 …",
        "UPDATE outbox SET payload = payload || '{\"balance_after\": 9}'": "events whose balance_after is not the sum"
        " of amounts until then",
        "DELETE FROM transfers": "events without their transfer",
    }.items():
        query(databases, harm)
        assert found in audit(databases)


# The cost -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """The statements that the service has run."""
    found: list[str] = []

    def remember(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        found.append(statement)

    event.listen(Engine, "before_cursor_execute", remember)
    yield found
    event.remove(Engine, "before_cursor_execute", remember)


def test_a_transfer_takes_five_statements(client: Client, statements: list[str]) -> None:
    """Lock, claim, balances, transfer, events: each is a round trip while both accounts are locked."""
    user = client.open()
    bank = client.fund(user, 100)
    for expected in (5, 3):  # a repetition: lock, claim, look up the answer
        statements.clear()
        assert client.transfer(user, bank, 1, key="k").status_code == 201
        assert len(statements) == expected, statements
