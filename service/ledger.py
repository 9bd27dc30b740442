"""The rules of the ledger, without a database: what a change makes of an account, or why it is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal
from uuid import UUID

BALANCE_MAX_MINOR = 2**63 - 1  # a balance is a bigint
BALANCE_MIN_MINOR = -(2**63)

Kind = Literal["user", "system"]
Status = Literal["open", "frozen", "closed"]


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


class AccountFrozen(Refusal):
    """The account is frozen."""


class AccountClosed(Refusal):
    """The account is closed."""


class BalanceNotZero(Refusal):
    """An account with money, or with debts, would be closed."""


@dataclass(frozen=True)
class Account:
    """An account as it is. Money in minor units of its currency.

    ``version`` numbers the changes of its balance, ``account_version`` those of its life: each has events of its own.
    """

    id: UUID
    kind: Kind
    currency: str
    balance_minor: int = 0
    version: int = 0
    status: Status = "open"
    account_version: int = 1

    def changed_by(self, amount_minor: int) -> Account:
        """The account after a change of its balance. Raises Refusal if the rules forbid it."""
        self._require_open()
        balance_minor = self.balance_minor + amount_minor
        if self.kind == "user" and balance_minor < 0:
            raise InsufficientFunds(f"account {self.id} has less than the amount")
        if not BALANCE_MIN_MINOR <= balance_minor <= BALANCE_MAX_MINOR:
            raise BalanceOutOfRange(f"the balance of account {self.id} would not fit into 64 bits")
        return replace(self, balance_minor=balance_minor, version=self.version + 1)

    def frozen(self) -> Account:
        """The account when it is frozen. Raises Refusal if it is frozen or closed already."""
        self._require_open()
        return self._with("frozen")

    def closed(self) -> Account:
        """The account when it is closed. Raises Refusal if it is closed already, or if its balance is not zero."""
        if self.status == "closed":
            raise AccountClosed(f"account {self.id} is closed")
        if self.balance_minor:
            raise BalanceNotZero(f"account {self.id} has a balance of {self.balance_minor}")
        return self._with("closed")

    def _require_open(self) -> None:
        if self.status != "open":
            refusal = AccountFrozen if self.status == "frozen" else AccountClosed
            raise refusal(f"account {self.id} is {self.status}")

    def _with(self, status: Status) -> Account:
        return replace(self, status=status, account_version=self.account_version + 1)


def transfer(source: Account, target: Account, amount_minor: int) -> tuple[Account, Account]:
    """Both accounts after a positive amount moved from the first to the second. Raises Refusal."""
    if source.currency != target.currency:
        raise CurrencyMismatch(f"account {source.id} holds {source.currency}, account {target.id} {target.currency}")
    return source.changed_by(-amount_minor), target.changed_by(amount_minor)
