"""What tests of the service share: a client of the application in this process, and an audit of the ledger's books."""

from __future__ import annotations

import uuid
from typing import Any

from werkzeug.test import TestResponse

from outbox.base.settings import Settings
from tests.support.queries import query
from tests.support.service_client import ServiceClient


class Client(ServiceClient):
    """A client of the ledger service."""

    def open(self, kind: str = "user", currency: str = "EUR") -> str:
        """Open an account and return its id."""
        response = self.post("/accounts", {"kind": kind, "currency": currency})
        assert response.status_code == 201, response.text
        return str(response.get_json()["id"])

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


EVENTS = """(
    SELECT id AS event_id, aggregateid AS key, (payload ->> 'amount')::numeric AS amount,
           (payload ->> 'version')::bigint AS version
      FROM outbox) AS events"""

# What must never be found in the books, and the query that finds it.
WRONG = {
    "money made or lost": "SELECT sum(balance_minor) FROM accounts HAVING sum(balance_minor) <> 0",
    "users below zero": "SELECT id FROM accounts WHERE kind = 'user' AND balance_minor < 0",
    "accounts that are not the sum of their events": f"""
        SELECT accounts.id, balance_minor, accounts.version, count(event_id), sum(amount)
          FROM accounts LEFT JOIN {EVENTS} ON key = accounts.id::text
         GROUP BY accounts.id
        HAVING balance_minor <> coalesce(sum(amount), 0) OR accounts.version <> count(event_id)""",
    "versions that are not 1, 2, 3 …": f"""
        SELECT key, version
          FROM (SELECT key, version, row_number() OVER (PARTITION BY key ORDER BY version) AS due FROM {EVENTS})
         WHERE version <> due""",
    "events whose balance_after is not the sum of amounts until then": """
        SELECT id
          FROM (SELECT id, (payload ->> 'balance_after')::numeric AS told,
                       sum((payload ->> 'amount')::numeric)
                           OVER (PARTITION BY aggregateid ORDER BY (payload ->> 'version')::bigint) AS due
                  FROM outbox)
         WHERE told <> due""",
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
         WHERE transfers.id IS NULL""",
    "answers of transfers that are not there": """
        SELECT key
          FROM idempotency_keys LEFT JOIN transfers ON transfers.id = (body::json ->> 'id')::uuid
         WHERE status = 201 AND transfers.id IS NULL""",
}


def audit(settings: Settings) -> dict[str, list[tuple[Any, ...]]]:
    """What is wrong with the books: nothing, if all is well."""
    found = {name: query(settings, sql) for name, sql in WRONG.items()}
    return {name: rows for name, rows in found.items() if rows}
