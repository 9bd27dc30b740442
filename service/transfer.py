"""The write transaction: both balances, the transfer, its two events and the response, or nothing.

The order is: lock, decide, claim the key, write. If this process or the database is killed at any point, the whole
transaction is committed or nothing of it. A client without a response repeats its request with the same key, and the
transfer is made once.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from http import HTTPStatus
from uuid import UUID

from sqlalchemy import ARRAY, BigInteger, Connection, Uuid, bindparam, insert, select, text

from outbox.http import idempotency, problems
from outbox.http.idempotency import Answer, Key
from outbox.writing.append import Event, append
from service import ledger
from service.ledger import Account, Refusal, UnknownAccount
from service.refusals import REFUSALS
from service.schemas import NewTransfer, Transfer
from service.tables import accounts, transfers

# Statements are built once. The order is always that of the ids, so that transfers between the same accounts queue up
# instead of deadlocking.
_LOCK = (
    select(accounts.c.id, accounts.c.kind, accounts.c.currency, accounts.c.balance_minor, accounts.c.version)
    .where(accounts.c.id.in_(bindparam("ids", expanding=True)))
    .order_by(accounts.c.id)
    .with_for_update(key_share=True)
)
_UPDATE = text("""
    UPDATE accounts
       SET balance_minor = after.balance_minor, version = after.version
      FROM unnest(:ids, :balances_minor, :versions) AS after (id, balance_minor, version)
     WHERE accounts.id = after.id
""").bindparams(
    bindparam("ids", type_=ARRAY(Uuid)),
    bindparam("balances_minor", type_=ARRAY(BigInteger)),
    bindparam("versions", type_=ARRAY(BigInteger)),
)
_INSERT = insert(transfers).inline()


def transfer(connection: Connection, wanted: NewTransfer, key: Key, traceparent: str | None = None) -> Answer:
    """Make the transfer or refuse it, in the caller's transaction; either answer is stored under the key.

    If the key is taken, nothing is written and the first answer is returned. Never commits. Raises KeyReused if another
    request has claimed the key.
    """
    before = _lock(connection, wanted.from_account, wanted.to_account)
    try:
        after = ledger.transfer(_pick(before, wanted.from_account), _pick(before, wanted.to_account), wanted.amount)
    except Refusal as refusal:
        problem = problems.of_kind(REFUSALS[type(refusal)], str(refusal))
        return idempotency.first_answer(connection, key, Answer(problem.status, problems.dump(problem)))

    # The id and the time come from here, not from the database: the claim stores the answer before the row exists.
    made = Transfer(id=uuid.uuid4(), **dict(wanted), currency=after[0].currency, created_at=datetime.now(UTC))
    answer = idempotency.first_answer(connection, key, Answer(HTTPStatus.CREATED, made.model_dump_json()))
    if not answer.is_repeated:
        _write(connection, made, after)
        append(connection, *_events(made, after, traceparent))
    return answer


def _lock(connection: Connection, *account_ids: UUID) -> dict[UUID, Account]:
    """Lock the accounts that exist until the end of the transaction, and return their locked state."""
    return {row.id: Account(*row) for row in connection.execute(_LOCK, {"ids": account_ids})}


def _pick(found: dict[UUID, Account], account_id: UUID) -> Account:
    if account_id not in found:
        raise UnknownAccount(f"account {account_id} does not exist")
    return found[account_id]


def _write(connection: Connection, made: Transfer, after: tuple[Account, Account]) -> None:
    connection.execute(
        _UPDATE,
        {
            "ids": [account.id for account in after],
            "balances_minor": [account.balance_minor for account in after],
            "versions": [account.version for account in after],
        },
    )
    connection.execute(
        _INSERT,
        {
            "id": made.id,
            "from_account_id": made.from_account,
            "to_account_id": made.to_account,
            "amount_minor": made.amount,
            "currency": made.currency,
            "created_at": made.created_at,
        },
    )


def _events(made: Transfer, after: tuple[Account, Account], traceparent: str | None) -> list[Event]:
    """One event per account, as defined by connect/events/ledger-event.v1.schema.json."""
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
