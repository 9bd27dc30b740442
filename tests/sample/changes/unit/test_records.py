"""What is wrong with the record of a change. That the stream lets pass just the others is shown with Spark."""

from __future__ import annotations

import pytest

from outbox.sink.verdict import Verdict
from sinks.changes.events import Judge
from tests.sample.changes.change_log import CASES, DELETED, UPDATED

JUDGE = Judge()


@pytest.mark.parametrize("name", CASES)
def test_the_fault_of_a_record_is_found(name: str) -> None:
    (key, value), reason = CASES[name]
    found = JUDGE.judge(key, [], value, 0)
    assert (found.reason if isinstance(found, Verdict) else None) == reason


def test_a_good_one_is_its_staged_columns() -> None:
    key, value = UPDATED.record()
    assert JUDGE.judge(key, [], value, 0) == {
        "table_name": "accounts",
        "account_id": UPDATED.account_id,
        "op": "u",
        "lsn": UPDATED.lsn,
        "currency": "EUR",
        "balance_minor": UPDATED.balance_minor,
        "version": UPDATED.version,
    }


def test_of_a_deletion_what_debezium_makes_up_is_left_out() -> None:
    key, value = DELETED.record()
    assert b'"balance_minor": 0' in value
    found = JUDGE.judge(key, [], value, 0)
    assert isinstance(found, dict)
    assert (found["op"], found["currency"], found["balance_minor"], found["version"]) == ("d", None, None, None)


def test_there_is_always_a_verdict_on_what_did_not_pass() -> None:
    key, value = UPDATED.record()
    assert JUDGE.verdict(key, [], value, 0).reason == "unreadable"
