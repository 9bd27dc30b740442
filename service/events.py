"""The events of the ledger, typed by connect/events: what `append` writes beside the rows."""

from __future__ import annotations

from datetime import datetime

from outbox import Event

from service.ledger import Account
from service.payloads import (
    AccountClosedV1,
    AccountFrozenV1,
    AccountOpenedV2,
    BalanceCreditedV1,
    BalanceDebitedV1,
)
from service.schemas import Transfer


def opened(account: Account, label: str, at: datetime) -> Event:
    """An account exists: account.opened, version 2."""
    return Event.of(
        AccountOpenedV2(
            account_id=account.id,
            kind=account.kind,
            currency=account.currency,
            label=label,
            version=account.account_version,
            occurred_at=at,
        )
    )


def frozen(account: Account, reason: str, at: datetime) -> Event:
    """An account takes part in no more transfers: account.frozen."""
    return Event.of(
        AccountFrozenV1(account_id=account.id, reason=reason, version=account.account_version, occurred_at=at)
    )


def closed(account: Account, at: datetime) -> Event:
    """An account is gone for good: account.closed."""
    return Event.of(AccountClosedV1(account_id=account.id, version=account.account_version, occurred_at=at))


def transferred(made: Transfer, after: tuple[Account, Account]) -> list[Event]:
    """Money has left an account and come to another: balance.debited and balance.credited."""
    source, target = after
    changes: list[tuple[type[BalanceDebitedV1 | BalanceCreditedV1], Account, int]] = [
        (BalanceDebitedV1, source, -made.amount),
        (BalanceCreditedV1, target, made.amount),
    ]
    return [
        Event.of(
            payload(
                transfer_id=made.id,
                account_id=account.id,
                amount=amount_minor,
                currency=account.currency,
                balance_after=account.balance_minor,
                version=account.version,
                occurred_at=made.created_at,
            )
        )
        for payload, account, amount_minor in changes
    ]
