"""The write transaction: both balances, the transfer, its two events and the answer, or nothing.

The order is: lock, decide, claim the key, write. If this process or the database is killed at any point, the whole
transaction is committed or nothing of it. A client without a response repeats its request with the same key, and the
transfer is made once.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

from outbox.web import Change
from sqlalchemy import ARRAY, BigInteger, Connection, Uuid, bindparam, insert, text

from service import events, ledger
from service.ledger import Account
from service.locking import lock, pick
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


def transfer(change: Change, wanted: NewTransfer) -> None:
    """Make the transfer, or raise Refusal."""
    before = lock(change.connection, wanted.from_account, wanted.to_account)
    after = ledger.transfer(pick(before, wanted.from_account), pick(before, wanted.to_account), wanted.amount)
    # The id and the time come from here, not from the database: the claim stores the answer before the row exists.
    made = Transfer(id=uuid.uuid4(), **dict(wanted), currency=after[0].currency, created_at=datetime.now(UTC))
    if change.claim(made):
        _write(change.connection, made, after)
        change.append(*events.transferred(made, after))


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
