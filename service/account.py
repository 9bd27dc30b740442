"""The life of an account: opened, frozen, closed. Each change is one transaction: row, event and answer, or nothing.

The order is that of a transfer: lock, decide, claim the key, write.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from uuid import UUID

from outbox import Event
from outbox.web import Change
from sqlalchemy import bindparam, insert, update

from service import events, ledger
from service.locking import lock, pick
from service.schemas import Account, AccountFreeze, AccountPath, AccountStatus, NewAccount
from service.tables import accounts

_INSERT = insert(accounts).inline()
_UPDATE = (
    update(accounts)
    .where(accounts.c.id == bindparam("account_id"))
    .values(status=bindparam("status"), account_version=bindparam("account_version"))
)


def open_account(change: Change, wanted: NewAccount) -> None:
    """Open an account."""
    opened = ledger.Account(uuid.uuid4(), wanted.kind, wanted.currency)
    made = Account(
        id=opened.id,
        **dict(wanted),
        status=opened.status,
        balance=opened.balance_minor,
        version=opened.version,
        created_at=datetime.now(UTC),
    )
    if change.claim(made):
        row = {**dict(wanted), "id": made.id, "account_version": opened.account_version, "created_at": made.created_at}
        change.connection.execute(_INSERT, row)
        change.append(events.opened(opened, made.label, made.created_at))


def freeze(change: Change, wanted: AccountFreeze) -> None:
    """Freeze an account, or raise Refusal."""
    after = _locked(change, wanted.account_id).frozen()
    _store(change, after, lambda at: events.frozen(after, wanted.reason, at))


def close(change: Change, wanted: AccountPath) -> None:
    """Close an account, or raise Refusal."""
    after = _locked(change, wanted.account_id).closed()
    _store(change, after, lambda at: events.closed(after, at))


def _locked(change: Change, account_id: UUID) -> ledger.Account:
    return pick(lock(change.connection, account_id), account_id)


def _store(change: Change, after: ledger.Account, event: Callable[[datetime], Event]) -> None:
    """Claim the key, and write the account's new status with the event of that moment."""
    made = AccountStatus(id=after.id, status=after.status, changed_at=datetime.now(UTC))
    if change.claim(made, HTTPStatus.OK):
        row = {"account_id": after.id, "status": after.status, "account_version": after.account_version}
        change.connection.execute(_UPDATE, row)
        change.append(event(made.changed_at))
