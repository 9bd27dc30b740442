"""Shared by tests of the service: a client of the application in this process, and an audit of the ledger's books."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

from outbox import Settings
from outbox_lab.testing import ServiceClient, query
from werkzeug.test import TestResponse


class Client(ServiceClient):
    """A client of the ledger service."""

    def open(self, kind: str = "user", currency: str = "EUR", label: str = "") -> str:
        """Open an account and return its id."""
        body = {"kind": kind, "currency": currency, "label": label}
        response = self.post("/accounts", body, Idempotency_Key=str(uuid.uuid4()))
        assert response.status_code == 201, response.text
        return str(response.get_json()["id"])

    def freeze(self, account: str, reason: str = "court order", key: str | None = None, **headers: str) -> TestResponse:
        """Ask to freeze an account, with a key of its own if none is given."""
        path = f"/accounts/{account}/freeze"
        return self.post(path, {"reason": reason}, Idempotency_Key=key or str(uuid.uuid4()), **headers)

    def close(self, account: str, key: str | None = None, **headers: str) -> TestResponse:
        """Ask to close an account, with a key of its own if none is given."""
        return self.post(f"/accounts/{account}/close", {}, Idempotency_Key=key or str(uuid.uuid4()), **headers)

    def transfer(self, source: str, target: str, amount: int, key: str | None = None, **headers: str) -> TestResponse:
        """Ask for a transfer, with a key of its own if none is given."""
        body = {"from_account": source, "to_account": target, "amount": amount}
        return self.post("/transfers", body, Idempotency_Key=key or str(uuid.uuid4()), **headers)

    def fund(self, account: str, amount: int, currency: str = "EUR") -> str:
        """Give an account money from a new system account, which is returned."""
        bank = self.open("system", currency)
        assert self.transfer(bank, account, amount).status_code == 201
        return bank

    def balance(self, account: str) -> int:
        return int(self.get(f"/accounts/{account}").get_json()["balance"])


def refused(response: TestResponse, status: int, kind: str) -> None:
    """Require that a response is this problem."""
    assert (response.status_code, response.get_json(force=True)["type"]) == (status, f"/problems/{kind}"), response.text
    assert response.content_type == "application/problem+json"


class Written(NamedTuple):
    """An event in the outbox table."""

    name: str  # with its version, such as account.opened.v2
    key: str
    payload: dict[str, Any]
    traceparent: str | None

    @property
    def declaration(self) -> tuple[str, str, int]:
        """Its aggregate type, event type and version."""
        aggregate, type_, version = self.name.split(".")
        return aggregate, type_, int(version.removeprefix("v"))


def written(settings: Settings, aggregate: str = "") -> list[Written]:
    """The events of an aggregate type, or all of them, the oldest first."""
    rows = query(
        settings,
        "SELECT concat(aggregatetype, '.', type, '.v', schema_version), aggregateid, payload, traceparent"
        f" FROM outbox WHERE '{aggregate}' IN ('', aggregatetype) ORDER BY id",
    )
    return [Written(*row) for row in rows]


EVENTS = """(
    SELECT id AS event_id, aggregatetype, aggregateid AS key, type, (payload ->> 'amount')::numeric AS amount,
           (payload ->> 'version')::bigint AS version
      FROM outbox) AS events"""

# What must never be found in the books, and the query that finds it.
WRONG = {
    "money made or lost": "SELECT sum(balance_minor) FROM accounts HAVING sum(balance_minor) <> 0",
    "users below zero": "SELECT id FROM accounts WHERE kind = 'user' AND balance_minor < 0",
    "closed accounts with money": "SELECT id FROM accounts WHERE status = 'closed' AND balance_minor <> 0",
    "accounts that are not the sum of their events": f"""
        SELECT accounts.id, balance_minor, accounts.version, count(event_id), sum(amount)
          FROM accounts LEFT JOIN {EVENTS} ON aggregatetype = 'balance' AND key = accounts.id::text
         GROUP BY accounts.id
        HAVING balance_minor <> coalesce(sum(amount), 0) OR accounts.version <> count(event_id)""",
    "accounts that are not as their latest event says": f"""
        SELECT accounts.id, status, account_version, newest.type, newest.version
          FROM accounts LEFT JOIN (
               SELECT DISTINCT ON (key) key, CASE type WHEN 'opened' THEN 'open' ELSE type END AS type, version
                 FROM {EVENTS} WHERE aggregatetype = 'account'
                ORDER BY key, version DESC) AS newest ON newest.key = accounts.id::text
         WHERE (status, account_version) IS DISTINCT FROM (newest.type, newest.version)""",
    "versions that are not 1, 2, 3 …": f"""
        SELECT aggregatetype, key, version
          FROM (SELECT *, row_number() OVER (PARTITION BY aggregatetype, key ORDER BY version) AS due
                  FROM {EVENTS}) AS one
         WHERE version <> due""",
    "events whose balance_after is not the sum of amounts until then": """
        SELECT id
          FROM (SELECT id, (payload ->> 'balance_after')::numeric AS stated,
                       sum((payload ->> 'amount')::numeric)
                           OVER (PARTITION BY aggregateid ORDER BY (payload ->> 'version')::bigint) AS due
                  FROM outbox WHERE aggregatetype = 'balance') AS found
         WHERE stated <> due""",
    "transfers without their two events": """
        SELECT transfers.id, count(outbox.id)
          FROM transfers LEFT JOIN outbox ON payload ->> 'transfer_id' = transfers.id::text
         GROUP BY transfers.id
        HAVING count(outbox.id) <> 2
            OR min((payload ->> 'amount')::numeric) <> - amount_minor
            OR max((payload ->> 'amount')::numeric) <> amount_minor""",
    "events without their transfer": """
        SELECT outbox.id
          FROM outbox LEFT JOIN transfers ON payload ->> 'transfer_id' = transfers.id::text
         WHERE aggregatetype = 'balance' AND transfers.id IS NULL""",
    "answers of transfers that do not exist": """
        SELECT key
          FROM idempotency_keys LEFT JOIN transfers ON transfers.id = (body::json ->> 'id')::uuid
         WHERE route = 'POST /transfers' AND status = 201 AND transfers.id IS NULL""",
    "answers of accounts that do not exist": """
        SELECT key
          FROM idempotency_keys LEFT JOIN accounts ON accounts.id = (body::json ->> 'id')::uuid
         WHERE route LIKE 'POST /accounts%' AND idempotency_keys.status < 300 AND accounts.id IS NULL""",
}


def audit(settings: Settings) -> dict[str, list[tuple[Any, ...]]]:
    """Errors in the books; none if they are right."""
    found = {name: query(settings, sql) for name, sql in WRONG.items()}
    return {name: rows for name, rows in found.items() if rows}
