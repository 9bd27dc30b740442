"""The life of an account: opened, frozen, closed. Each change is one transaction: row, event and response, or nothing.

The order is that of a transfer: lock, decide, claim the key, write.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from uuid import UUID

from sqlalchemy import Connection, bindparam, insert, update

from outbox.http import idempotency
from outbox.http.idempotency import Answer, Key
from outbox.writing.append import Event, append
from service import events, ledger
from service.ledger import Refusal
from service.locking import lock, pick
from service.refusals import refuse
from service.schemas import Account, AccountFreeze, AccountPath, AccountStatus, NewAccount
from service.tables import accounts

_INSERT = insert(accounts).inline()
_UPDATE = (
    update(accounts)
    .where(accounts.c.id == bindparam("account_id"))
    .values(status=bindparam("status"), account_version=bindparam("account_version"))
)


def open_account(connection: Connection, wanted: NewAccount, key: Key, traceparent: str | None = None) -> Answer:
    """Open an account in the caller's transaction. If the key is taken, the first answer is returned. Never commits.

    Raises KeyReused if another request has claimed the key.
    """
    opened = ledger.Account(uuid.uuid4(), wanted.kind, wanted.currency)
    made = Account(
        id=opened.id,
        **dict(wanted),
        status=opened.status,
        balance=opened.balance_minor,
        version=opened.version,
        created_at=datetime.now(UTC),
    )
    answer = idempotency.first_answer(connection, key, Answer(HTTPStatus.CREATED, made.model_dump_json()))
    if not answer.is_repeated:
        row = {**dict(wanted), "id": made.id, "account_version": opened.account_version, "created_at": made.created_at}
        connection.execute(_INSERT, row)
        append(connection, events.opened(opened, made.label, made.created_at, traceparent))
    return answer


def freeze(connection: Connection, wanted: AccountFreeze, key: Key, traceparent: str | None = None) -> Answer:
    """Freeze an account in the caller's transaction, or refuse it; see ``open_account``."""
    try:
        after = _locked(connection, wanted.account_id).frozen()
    except Refusal as refusal:
        return refuse(connection, key, refusal)
    return _store(connection, key, after, lambda at: events.frozen(after, wanted.reason, at, traceparent))


def close(connection: Connection, wanted: AccountPath, key: Key, traceparent: str | None = None) -> Answer:
    """Close an account in the caller's transaction, or refuse it; see ``open_account``."""
    try:
        after = _locked(connection, wanted.account_id).closed()
    except Refusal as refusal:
        return refuse(connection, key, refusal)
    return _store(connection, key, after, lambda at: events.closed(after, at, traceparent))


def _locked(connection: Connection, account_id: UUID) -> ledger.Account:
    return pick(lock(connection, account_id), account_id)


def _store(connection: Connection, key: Key, after: ledger.Account, event: Callable[[datetime], Event]) -> Answer:
    """Claim the key, and write the account's new status with the event of that moment."""
    made = AccountStatus(id=after.id, status=after.status, changed_at=datetime.now(UTC))
    answer = idempotency.first_answer(connection, key, Answer(HTTPStatus.OK, made.model_dump_json()))
    if not answer.is_repeated:
        row = {"account_id": after.id, "status": after.status, "account_version": after.account_version}
        connection.execute(_UPDATE, row)
        append(connection, event(made.changed_at))
    return answer
