"""The ledger's judgement of reads, on histories written by hand: sound ones, and wrong in one way each."""

from __future__ import annotations

from typing import Any

import pytest
from outbox_lab.soak import Attempt, History, TopicEvent

from demo.soak import Domain

A, B = "account-a", "account-b"


def sent(number: int, path: str, answer: Any, times: tuple[float, float], *, status: int = 201) -> Attempt:
    """An attempt; a request to change something if its path is of no single account."""
    is_read = path.count("/") == 2
    key = None if is_read else f"key-{number}"
    method = "GET" if is_read else "POST"
    return Attempt(0, "any", method, path, key, None, times[0], times[1], status, answer)


def opening(account: str) -> Attempt:
    return sent(0, "/accounts", {"id": account, "status": "open"}, (0.0, 1.0))


def transfer(number: int, times: tuple[float, float], status: int = 201) -> Attempt:
    answer = {"id": f"transfer-{number}", "from_account": A, "to_account": B}
    return sent(number, "/transfers", answer, times, status=status)


def read(version: int, balance: int, sent_s: float, status: int = 200) -> Attempt:
    answer = {"id": A, "version": version, "balance": balance} if status == 200 else {"title": "not found"}
    return sent(0, f"/accounts/{A}", answer, (sent_s, sent_s + 1), status=status)


def event(number: int) -> TopicEvent:
    """The debit of transfer N, which leaves a balance of -10 N."""
    data = {"transfer_id": f"transfer-{number}", "balance_after": -10 * number}
    return TopicEvent(f"event-{number}", "balance", 0, number, A, "balance.debited.v1", number, data)


OPENED = TopicEvent("event-0", "account", 0, 0, A, "account.opened.v1", 1, {"account_id": A})
EVENTS = {one.id: one for one in (OPENED, event(1), event(2))}
CHANGES = (opening(A), transfer(1, (2.0, 3.0)), transfer(2, (8.0, 9.0)))


@pytest.mark.parametrize(
    ("one", "wrong"),
    {
        "new": (read(0, 0, 1.5), 0),
        "after a transfer": (read(1, -10, 3.5), 0),
        "during a transfer, before it": (read(1, -10, 8.5), 0),
        "during a transfer, after it": (read(2, -20, 8.5), 0),
        "another balance": (read(1, -11, 3.5), 1),
        "a version that nothing has made": (read(3, -30, 9.5), 1),
        "stale": (read(1, -10, 9.5), 1),
        "stale and new": (read(0, 0, 3.5), 1),
        "missing before it was opened": (read(0, 0, 0.5, status=404), 0),
        "missing": (read(0, 0, 1.5, status=404), 1),
        "no answer": (read(0, 0, 1.5, status=503), 0),
    }.values(),
    ids=lambda value: None if isinstance(value, int) else f"{value.status} at {value.sent_s}: {value.answer}",
)
def test_a_read_is_judged(one: Attempt, wrong: int) -> None:
    history = History((*CHANGES, one))
    assert len(list(Domain(1).contradictions(history, EVENTS))) == wrong


def test_a_transfer_without_an_answer_may_be_seen_or_not() -> None:
    history = History((opening(A), transfer(1, (2.0, 3.0), status=503), read(0, 0, 3.5), read(1, -10, 3.5)))
    assert not list(Domain(1).contradictions(history, EVENTS))


@pytest.mark.parametrize(("sent_s", "wrong"), [(4.5, 0), (5.5, 1)])
def test_a_read_is_not_older_than_one_before(sent_s: float, wrong: int) -> None:
    history = History((opening(A), transfer(1, (2.0, 3.0), status=503), read(1, -10, 4.0), read(0, 0, sent_s)))
    assert len(list(Domain(1).contradictions(history, EVENTS))) == wrong
