"""The write transaction: both balances, the transfer, its two events and the response, or nothing.

The order is: lock, decide, claim the key, write. If this process or the database is killed at any point, the whole
transaction is committed or nothing of it. A client without a response repeats its request with the same key, and the
transfer is made once.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from http import HTTPStatus

from sqlalchemy import ARRAY, BigInteger, Connection, Uuid, bindparam, insert, text

from outbox.http import idempotency
from outbox.http.idempotency import Answer, Key
from outbox.writing.append import append
from service import events, ledger
from service.ledger import Account, Refusal
from service.locking import lock, pick
from service.refusals import refuse
from service.schemas import NewTransfer, Transfer
from service.tables import transfers

# Statements are built once.
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
    before = lock(connection, wanted.from_account, wanted.to_account)
    try:
        after = ledger.transfer(pick(before, wanted.from_account), pick(before, wanted.to_account), wanted.amount)
    except Refusal as refusal:
        return refuse(connection, key, refusal)

    # The id and the time come from here, not from the database: the claim stores the answer before the row exists.
    made = Transfer(id=uuid.uuid4(), **dict(wanted), currency=after[0].currency, created_at=datetime.now(UTC))
    answer = idempotency.first_answer(connection, key, Answer(HTTPStatus.CREATED, made.model_dump_json()))
    if not answer.is_repeated:
        _write(connection, made, after)
        append(connection, *events.transferred(made, after, traceparent))
    return answer


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
