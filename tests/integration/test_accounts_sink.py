"""The sink `accounts`: what it makes of the service's events, whichever topic comes first. Without Kafka and Spark."""

from __future__ import annotations

import uuid
from typing import Any

import psycopg2
import pytest
from outbox import Settings, load_settings
from outbox_lab.testing import SinkRole, SourceRole, chosen_seed, deliver, outbox_records, query, rebuild, seeded

from tests.ledger import Client

SINK = "accounts"
PREFIX = load_settings(environment=False).topic_prefix
ACCOUNT, BALANCE = f"{PREFIX}.account", f"{PREFIX}.balance"
COLUMNS = "account_id::text, kind, currency, label, status, version, transfers, turnover_minor"
SOURCE = "SELECT key, kind, currency, label, status, version, transfers, turnover FROM source_accounts"

Records = list[dict[str, Any]]


def held(settings: Settings) -> dict[str, tuple[Any, ...]]:
    """Rows of the sink, by account."""
    rows = query(settings, f"SELECT {COLUMNS} FROM accounts WHERE sink = '{SINK}'", SinkRole.AUDITOR)
    return {account: tuple(values) for account, *values in rows}


def due(settings: Settings) -> dict[str, tuple[Any, ...]]:
    """Rows of the source, by account."""
    return {account: tuple(values) for account, *values in query(settings, SOURCE, SourceRole.AUDITOR)}


def use(client: Client) -> str:
    """Open some accounts, move money, freeze one and close one; return an account that has had all of it."""
    bank = client.open("system", label="bank")
    account, other = client.open(label="rent"), client.open()
    for source, target, amount in ((bank, account, 100), (account, other, 30), (account, bank, 70), (other, bank, 1)):
        assert client.transfer(source, target, amount).status_code == 201
    assert client.freeze(other).status_code == 200
    assert client.close(account).status_code == 200
    return account


def of(records: Records, topic: str) -> Records:
    return [record for record in records if record["topic"] == topic]


@pytest.mark.parametrize("first", [ACCOUNT, BALANCE])
def test_either_topic_may_be_the_first(client: Client, databases: Settings, first: str) -> None:
    account = use(client)
    records = outbox_records(databases)
    second = BALANCE if first == ACCOUNT else ACCOUNT
    deliver(databases, of(records, first), SINK)
    deliver(databases, of(records, second), SINK)
    assert held(databases) == due(databases)
    assert held(databases)[account] == ("user", "EUR", "rent", "closed", 2, 3, 200)


def test_accounts_that_are_known_by_transfers_only(client: Client, databases: Settings) -> None:
    account = use(client)
    deliver(databases, of(outbox_records(databases), BALANCE), SINK)
    assert held(databases)[account] == (None, None, None, None, 0, 3, 200)


def test_any_batches_in_any_order_come_to_the_same(client: Client, databases: Settings) -> None:
    choose = seeded(chosen_seed(), 0)
    for _ in range(3):
        use(client)
    left = {topic: of(outbox_records(databases), topic) for topic in (ACCOUNT, BALANCE)}
    while any(left.values()):
        topic = choose.choice([topic for topic, records in left.items() if records])
        count = choose.randint(1, 5)
        deliver(databases, [*left[topic][:count], left[topic][0]], SINK)  # the first one twice
        del left[topic][:count]
    assert held(databases) == due(databases)


def test_a_repeated_event_counts_once(client: Client, databases: Settings) -> None:
    use(client)
    records = outbox_records(databases)
    assert deliver(databases, [*records, *records], SINK).duplicates == len(records)
    again = deliver(databases, records, SINK)
    assert {name: count for name, count in again._asdict().items() if count} == {
        "rows": len(records),
        "duplicates": len(records),
    }
    assert held(databases) == due(databases)


def test_an_opening_of_version_1_has_an_empty_label(client: Client, databases: Settings) -> None:
    client.open(label="rent")
    [record] = outbox_records(databases)
    del record["value"]["label"]
    record["headers"]["schemaVersion"] = "1"
    deliver(databases, [record], SINK)
    assert [row[:4] for row in held(databases).values()] == [("user", "EUR", "", "open")]


def test_a_late_event_does_not_undo_a_younger_status(client: Client, databases: Settings) -> None:
    account = client.open()
    client.freeze(account)
    client.close(account)
    opened, frozen, closed = outbox_records(databases)
    assert deliver(databases, [opened, {**frozen, "value": {}}, closed], SINK).dead == 1
    assert held(databases) == due(databases)
    assert deliver(databases, [frozen], SINK).applied == 1
    assert held(databases) == due(databases)


def test_two_openings_of_an_account_do_not_stop_the_sink(client: Client, databases: Settings) -> None:
    """The service writes one; a foreign writer may write more."""
    client.open(label="first")
    [opened] = outbox_records(databases)
    again = {
        **opened,
        "headers": {**opened["headers"], "id": opened["headers"]["id"][:-4] + "ffff"},
        "value": {**opened["value"], "label": "second", "version": 2},
    }
    assert deliver(databases, [opened, again], SINK).applied == 2
    assert [(row[2], row[4]) for row in held(databases).values()] == [("second", 2)]


def test_a_late_opening_does_not_undo_a_younger_one(client: Client, databases: Settings) -> None:
    client.open(label="first")
    [first] = outbox_records(databases)
    second = {
        **first,
        "headers": {**first["headers"], "id": first["headers"]["id"][:-4] + "ffff"},
        "value": {**first["value"], "label": "second", "version": 2},
    }
    assert deliver(databases, [{**first, "value": {}}, second], SINK).dead == 1
    assert deliver(databases, [first], SINK).applied == 1
    assert [(row[2], row[4]) for row in held(databases).values()] == [("second", 2)]


def test_the_largest_debit_does_not_stop_the_sink(client: Client, databases: Settings) -> None:
    user = client.open()
    client.fund(user, 1)
    debited = next(record for record in outbox_records(databases) if record["headers"]["eventType"] == "debited")
    debited["value"]["amount"] = -(2**63)
    deliver(databases, [debited], SINK)
    assert [row[-1] for row in held(databases).values()] == [2**63]


# From the source ----------------------------------------------------------------------------------------------------


def test_accounts_are_rebuilt_from_the_source(client: Client, databases: Settings) -> None:
    account = use(client)
    records = outbox_records(databases)
    deliver(databases, records, SINK)
    harm = f"UPDATE accounts SET turnover_minor = 5, status = 'open', label = 'x' WHERE account_id = '{account}'"
    query(databases, harm, SinkRole.OWNER)
    assert rebuild(databases, SINK) == {account: 195}
    assert held(databases) == due(databases)
    assert deliver(databases, records, SINK).applied == 0, "the source has had them"


def test_accounts_from_before_come_by_a_rebuild(client: Client, databases: Settings) -> None:
    query(databases, "INSERT INTO accounts (id, kind, currency) VALUES (gen_random_uuid(), 'user', 'EUR')")
    assert held(databases) == {}
    rebuild(databases, SINK)
    [(account, row)] = held(databases).items()
    assert row == ("user", "EUR", "", "open", 0, 0, 0)
    assert client.freeze(account).status_code == 200
    assert deliver(databases, outbox_records(databases), SINK).applied == 1
    assert held(databases) == due(databases)


def test_an_account_that_the_source_does_not_have_is_emptied(client: Client, databases: Settings) -> None:
    use(client)
    deliver(databases, outbox_records(databases), SINK)
    gone = str(uuid.uuid4())
    query(
        databases,
        f"INSERT INTO accounts (sink, account_id, status, transfers, turnover_minor)"
        f" VALUES ('{SINK}', '{gone}', 'open', 2, 9)",
        SinkRole.OWNER,
    )
    assert rebuild(databases, SINK) == {gone: -9}
    assert held(databases)[gone][3:] == (None, 0, 0, 0)


@pytest.mark.parametrize(
    ("role", "statement"),
    [(SinkRole.WRITER, "DELETE FROM accounts"), (SinkRole.AUDITOR, "UPDATE accounts SET label = ''")],
)
def test_what_a_role_may_not_do_is_refused(shared_databases: Settings, role: SinkRole, statement: str) -> None:
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        query(shared_databases, statement, role)
