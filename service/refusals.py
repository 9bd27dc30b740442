"""The problem that each refusal of the ledger becomes."""

from __future__ import annotations

from http import HTTPStatus

from outbox.web import Kind

from service.ledger import (
    AccountClosed,
    AccountFrozen,
    BalanceNotZero,
    BalanceOutOfRange,
    CurrencyMismatch,
    InsufficientFunds,
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
