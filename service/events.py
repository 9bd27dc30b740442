"""The events of the ledger, as connect/events declares them: what `append` writes beside the rows."""

from __future__ import annotations

from datetime import datetime

from outbox import Event

from service.ledger import Account
from service.schemas import Transfer


def opened(account: Account, label: str, at: datetime) -> Event:
    """An account exists: account.opened, version 2."""
    payload = {
        "account_id": str(account.id),
        "kind": account.kind,
        "currency": account.currency,
        "label": label,
        "version": account.account_version,
        "occurred_at": _moment(at),
    }
    return Event("account", str(account.id), "opened", payload, schema_version=2)


def frozen(account: Account, reason: str, at: datetime) -> Event:
    """An account takes part in no more transfers: account.frozen."""
    payload = {
        "account_id": str(account.id),
        "reason": reason,
        "version": account.account_version,
        "occurred_at": _moment(at),
    }
    return Event("account", str(account.id), "frozen", payload)


def closed(account: Account, at: datetime) -> Event:
    """An account is gone for good: account.closed."""
    payload = {
        "account_id": str(account.id),
        "version": account.account_version,
        "occurred_at": _moment(at),
    }
    return Event("account", str(account.id), "closed", payload)


def transferred(made: Transfer, after: tuple[Account, Account]) -> list[Event]:
    """Money has left an account and come to another: balance.debited and balance.credited."""
    source, target = after
    changes = [("debited", source, -made.amount), ("credited", target, made.amount)]
    return [
        Event(
            aggregatetype="balance",
            aggregateid=str(account.id),
            type=type_,
            payload={
                "transfer_id": str(made.id),
                "account_id": str(account.id),
                "amount": amount_minor,
                "currency": account.currency,
                "balance_after": account.balance_minor,
                "version": account.version,
                "occurred_at": _moment(made.created_at),
            },
        )
        for type_, account, amount_minor in changes
    ]


def _moment(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
