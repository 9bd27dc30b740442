"""The rules of the ledger, without a database: the effect of a transfer on its two accounts, or why it is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal
from uuid import UUID

BALANCE_MAX_MINOR = 2**63 - 1  # a balance is a bigint
BALANCE_MIN_MINOR = -(2**63)

Kind = Literal["user", "system"]


class Refusal(Exception):
    """A request that the rules do not allow. The message tells the client why."""


class UnknownAccount(Refusal):
    """The account does not exist."""


class CurrencyMismatch(Refusal):
    """The two accounts hold different currencies."""


class InsufficientFunds(Refusal):
    """A user account would fall below zero."""


class BalanceOutOfRange(Refusal):
    """A balance would not fit into 64 bits."""


@dataclass(frozen=True)
class Account:
    """An account in one of its versions. Money in minor units of its currency."""

    id: UUID
    kind: Kind
    currency: str
    balance_minor: int
    version: int

    def changed_by(self, amount_minor: int) -> Account:
        """The next version of the account. Raises Refusal if the rules forbid the new balance."""
        balance_minor = self.balance_minor + amount_minor
        if self.kind == "user" and balance_minor < 0:
            raise InsufficientFunds(f"account {self.id} has less than the amount")
        if not BALANCE_MIN_MINOR <= balance_minor <= BALANCE_MAX_MINOR:
            raise BalanceOutOfRange(f"the balance of account {self.id} would not fit into 64 bits")
        return replace(self, balance_minor=balance_minor, version=self.version + 1)


def transfer(source: Account, target: Account, amount_minor: int) -> tuple[Account, Account]:
    """Both accounts after a positive amount moved from the first to the second. Raises Refusal."""
    if source.currency != target.currency:
        raise CurrencyMismatch(f"account {source.id} holds {source.currency}, account {target.id} {target.currency}")
    return source.changed_by(-amount_minor), target.changed_by(amount_minor)
