"""The one write transaction: both balances, the transfer, its two events and the answer, or nothing.

Read it as: lock, decide, claim the key, write. Whatever happens in between, be it kill -9 of this process or of the
database, the transaction is committed as a whole or was never there; a client that got no answer sends its request
again with the same key, and the transfer is made once.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from http import HTTPStatus
from uuid import UUID

from sqlalchemy import Connection, case, insert, select, update

from outbox.writing.append import Event, append
from service import idempotency, ledger, problems
from service.idempotency import Answer, Key
from service.ledger import Account, Refusal, UnknownAccount
from service.schemas import NewTransfer, Transfer
from service.tables import accounts, transfers


def transfer(connection: Connection, wanted: NewTransfer, key: Key, traceparent: str | None = None) -> Answer:
    """Make the transfer or refuse it, in the caller's transaction; either answer is remembered under the key.

    If the key is taken, nothing is written and the first answer is returned. Never commits. Raises KeyReused if the key
    was taken by another request.
    """
    before = _lock(connection, wanted.from_account, wanted.to_account)
    try:
        after = ledger.transfer(_pick(before, wanted.from_account), _pick(before, wanted.to_account), wanted.amount)
    except Refusal as refusal:
        problem = problems.of_refusal(refusal)
        return idempotency.first_answer(connection, key, Answer(problem.status, problems.dump(problem)))

    # The id and the time are made here, not by the database: the answer is kept with the claim, before there is a row.
    made = Transfer(id=uuid.uuid4(), **dict(wanted), currency=after[0].currency, created_at=datetime.now(UTC))
    answer = idempotency.first_answer(connection, key, Answer(HTTPStatus.CREATED, made.model_dump_json()))
    if not answer.is_repeated:
        _write(connection, made, after)
        append(connection, *_events(made, after, traceparent))
    return answer


def _lock(connection: Connection, *account_ids: UUID) -> dict[UUID, Account]:
    """Lock the accounts that exist until the end of the transaction, and return them as they are then.

    Always in the order of their ids, so that transfers between the same accounts queue up instead of deadlocking.
    """
    rows = connection.execute(
        select(accounts.c.id, accounts.c.kind, accounts.c.currency, accounts.c.balance_minor, accounts.c.version)
        .where(accounts.c.id.in_(account_ids))
        .order_by(accounts.c.id)
        .with_for_update(key_share=True)
    )
    return {row.id: Account(**row._mapping) for row in rows}


def _pick(found: dict[UUID, Account], account_id: UUID) -> Account:
    if account_id not in found:
        raise UnknownAccount(f"there is no account {account_id}")
    return found[account_id]


def _write(connection: Connection, made: Transfer, after: tuple[Account, Account]) -> None:
    connection.execute(
        update(accounts)
        .where(accounts.c.id.in_([account.id for account in after]))
        .values(
            balance_minor=case({account.id: account.balance_minor for account in after}, value=accounts.c.id),
            version=case({account.id: account.version for account in after}, value=accounts.c.id),
        )
    )
    connection.execute(
        insert(transfers)
        .values(
            id=made.id,
            from_account_id=made.from_account,
            to_account_id=made.to_account,
            amount_minor=made.amount,
            currency=made.currency,
            created_at=made.created_at,
        )
        .inline()
    )


def _events(made: Transfer, after: tuple[Account, Account], traceparent: str | None) -> list[Event]:
    """One event for each account, as connect/events/ledger-event.v1.schema.json says."""
    source, target = after
    changes = [("transfer.debited", source, -made.amount), ("transfer.credited", target, made.amount)]
    return [
        Event(
            aggregatetype="account",
            aggregateid=str(account.id),
            type=type_,
            payload={
                "transfer_id": str(made.id),
                "account_id": str(account.id),
                "amount": amount_minor,
                "currency": account.currency,
                "balance_after": account.balance_minor,
                "version": account.version,
                "occurred_at": made.created_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
            traceparent=traceparent,
        )
        for type_, account, amount_minor in changes
    ]
