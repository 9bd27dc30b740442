"""The problem that each refusal of the ledger becomes."""

from __future__ import annotations

from http import HTTPStatus

from sqlalchemy import Connection

from outbox.http import idempotency, problems
from outbox.http.idempotency import Answer, Key
from outbox.http.problems import Kind
from service.ledger import (
    AccountClosed,
    AccountFrozen,
    BalanceNotZero,
    BalanceOutOfRange,
    CurrencyMismatch,
    InsufficientFunds,
    Refusal,
    UnknownAccount,
)

REFUSALS: dict[type[Exception], Kind] = {
    UnknownAccount: Kind(HTTPStatus.NOT_FOUND, "/problems/unknown-account", "Unknown account"),
    CurrencyMismatch: Kind(HTTPStatus.CONFLICT, "/problems/currency-mismatch", "Currency mismatch"),
    InsufficientFunds: Kind(HTTPStatus.CONFLICT, "/problems/insufficient-funds", "Insufficient funds"),
    BalanceOutOfRange: Kind(HTTPStatus.CONFLICT, "/problems/balance-out-of-range", "Balance out of range"),
    AccountFrozen: Kind(HTTPStatus.CONFLICT, "/problems/account-frozen", "Account frozen"),
    AccountClosed: Kind(HTTPStatus.CONFLICT, "/problems/account-closed", "Account closed"),
    BalanceNotZero: Kind(HTTPStatus.CONFLICT, "/problems/balance-not-zero", "Balance not zero"),
}


def refuse(connection: Connection, key: Key, refusal: Refusal) -> Answer:
    """The answer to a refused request, stored under its key; the first answer if the key is taken."""
    problem = problems.of_kind(REFUSALS[type(refusal)], str(refusal))
    return idempotency.first_answer(connection, key, Answer(problem.status, problems.dump(problem)))
