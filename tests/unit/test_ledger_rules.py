"""The rules of the ledger, without a database."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.ledger import (
    BALANCE_MAX_MINOR,
    BALANCE_MIN_MINOR,
    Account,
    AccountClosed,
    AccountFrozen,
    BalanceNotZero,
    BalanceOutOfRange,
    CurrencyMismatch,
    InsufficientFunds,
    Kind,
    Refusal,
    transfer,
)


def account(balance_minor: int, kind: Kind = "user", currency: str = "EUR", version: int = 7) -> Account:
    return Account(uuid.uuid4(), kind, currency, balance_minor, version)


def test_a_transfer_moves_the_amount_and_counts_both_versions() -> None:
    source, target = account(100, version=3), account(5, version=9)
    after_source, after_target = transfer(source, target, 60)
    assert (after_source.balance_minor, after_source.version) == (40, 4)
    assert (after_target.balance_minor, after_target.version) == (65, 10)
    assert (after_source.id, after_target.id) == (source.id, target.id)


def test_a_user_may_spend_all_it_has_and_no_more() -> None:
    assert transfer(account(100), account(0), 100)[0].balance_minor == 0
    with pytest.raises(InsufficientFunds):
        transfer(account(100), account(0), 101)


def test_a_system_account_may_fall_below_zero_down_to_what_fits() -> None:
    assert transfer(account(0, "system"), account(0), 1)[0].balance_minor == -1
    assert transfer(account(BALANCE_MIN_MINOR + 1, "system"), account(0), 1)[0].balance_minor == BALANCE_MIN_MINOR
    with pytest.raises(BalanceOutOfRange):
        transfer(account(BALANCE_MIN_MINOR, "system"), account(0), 1)


def test_a_balance_that_would_not_fit_is_refused() -> None:
    assert transfer(account(1), account(BALANCE_MAX_MINOR - 1), 1)[1].balance_minor == BALANCE_MAX_MINOR
    with pytest.raises(BalanceOutOfRange):
        transfer(account(1), account(BALANCE_MAX_MINOR), 1)


def test_two_currencies_do_not_mix() -> None:
    with pytest.raises(CurrencyMismatch):
        transfer(account(100, currency="EUR"), account(100, currency="USD"), 1)


def test_each_change_of_its_life_is_one_more_account_version() -> None:
    opened = account(0)
    frozen = opened.frozen()
    closed = frozen.closed()
    assert [(one.status, one.account_version) for one in (opened, frozen, closed)] == [
        ("open", 1),
        ("frozen", 2),
        ("closed", 3),
    ]
    assert closed.version == opened.version


@pytest.mark.parametrize(("kind", "balance_minor"), [("user", 1), ("system", 1), ("system", -1)])
def test_an_account_with_money_or_debts_is_not_closed(kind: Kind, balance_minor: int) -> None:
    with pytest.raises(BalanceNotZero):
        account(balance_minor, kind).closed()


def test_a_frozen_or_closed_account_takes_part_in_no_transfer() -> None:
    frozen, closed, other = account(100).frozen(), account(0).closed(), account(100)
    for one, refusal in ((frozen, AccountFrozen), (closed, AccountClosed)):
        for pair in ((one, other), (other, one)):
            with pytest.raises(refusal):
                transfer(*pair, 1)


def test_no_status_comes_twice_and_none_behind_closed() -> None:
    with pytest.raises(AccountFrozen):
        account(0).frozen().frozen()
    with pytest.raises(AccountClosed):
        account(0).closed().frozen()
    with pytest.raises(AccountClosed):
        account(0).closed().closed()


BALANCES = st.integers(BALANCE_MIN_MINOR, BALANCE_MAX_MINOR)
KINDS = st.sampled_from(["user", "system"])


@given(BALANCES, KINDS, BALANCES, KINDS, st.integers(1, BALANCE_MAX_MINOR))
def test_whatever_is_asked_money_is_neither_made_nor_lost(
    source_minor: int, source_kind: Kind, target_minor: int, target_kind: Kind, amount_minor: int
) -> None:
    source, target = account(source_minor, source_kind), account(target_minor, target_kind)
    try:
        after = transfer(source, target, amount_minor)
    except Refusal:
        return
    assert sum(one.balance_minor for one in after) == source_minor + target_minor
    assert all(BALANCE_MIN_MINOR <= one.balance_minor <= BALANCE_MAX_MINOR for one in after)
    assert after[0].kind == "system" or after[0].balance_minor >= 0
