"""Accounts locked for a change: a request decides on an account's current state, and no other changes it meanwhile."""

from __future__ import annotations

from uuid import UUID

from sqlalchemy import Connection, bindparam, select

from service.ledger import Account, UnknownAccount
from service.tables import accounts

# Built once. The order is always that of the ids, so that transfers between the same accounts queue up instead of
# deadlocking.
_LOCK = (
    select(
        accounts.c.id,
        accounts.c.kind,
        accounts.c.currency,
        accounts.c.balance_minor,
        accounts.c.version,
        accounts.c.status,
        accounts.c.account_version,
    )
    .where(accounts.c.id.in_(bindparam("ids", expanding=True)))
    .order_by(accounts.c.id)
    .with_for_update(key_share=True)
)


def lock(connection: Connection, *account_ids: UUID) -> dict[UUID, Account]:
    """Lock the accounts that exist until the end of the transaction, and return their locked state."""
    return {row.id: Account(*row) for row in connection.execute(_LOCK, {"ids": account_ids})}


def pick(found: dict[UUID, Account], account_id: UUID) -> Account:
    """One of the locked accounts. Raises UnknownAccount if it does not exist."""
    if account_id not in found:
        raise UnknownAccount(f"account {account_id} does not exist")
    return found[account_id]
