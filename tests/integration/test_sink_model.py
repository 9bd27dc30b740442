"""Generated deliveries against a pure model: duplicated, reordered across accounts, cut into batches, re-read.

Kafka keeps the order of an account, so a delivery repeats and interleaves, but never swaps two events of one account
that come for the first time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outbox.settings import Settings
from outbox.sink.apply import Sink
from tests.sink import TOPIC, TOPIC_ID, Database, Event, account, batch, sums, uuid7
from tests.sink import open_sink as open_at

RANDOM = Random(20)  # noqa: S311  # of the ids alone; hypothesis chooses everything else
POOL = [
    Event(uuid7(RANDOM, at_ms=1_790_000_000_000 + number), account(number % 4), 5**number, number // 4 + 1)
    for number in range(16)
]


class Delivery(NamedTuple):
    """One batch: which events, and how many offsets before the position it starts (a re-read)."""

    events: list[int]
    back: int


deliveries = st.lists(
    st.builds(Delivery, st.lists(st.integers(0, len(POOL) - 1), max_size=12), st.integers(0, 5)), max_size=6
)
checked = settings(
    max_examples=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Run:
    """Deliveries to one sink, each example starting where the last has left it, in offsets of its own."""

    def __init__(self, sink: Sink, database: Database) -> None:
        self.sink = sink
        self.database = database
        self.generation = 0

    def deliver(self, batches: Sequence[Delivery]) -> list[Event]:
        """Deliver to accounts and ids that no example used before; return the events in the order they came."""
        self.generation += 1
        pool = [self._ours(event) for event in POOL]
        came = []
        position = self.sink.positions(TOPIC, TOPIC_ID).get(0, 0)
        for events, back in batches:
            chosen = [pool[number] for number in events]
            start = max(0, position - back)
            self.sink.apply(batch(chosen, start))
            position = max(position, start + len(chosen))
            came += chosen
        return came

    def balances(self) -> dict[str, int]:
        """The balances of this example's accounts."""
        ours = {self._ours(event).account_id for event in POOL}
        return {key: total for key, total in self.database.balances().items() if key in ours}

    def _ours(self, event: Event) -> Event:
        shift = self.generation << 8
        return Event(
            event_id=event.event_id[:24] + f"{int(event.event_id[24:], 16) ^ shift:012x}",
            account_id=account(int(event.account_id[-4:], 16) + shift),
            amount=event.amount,
            version=event.version,
        )


@contextmanager
def _run(databases: Settings, name: str) -> Iterator[Run]:
    with open_at(databases, name) as sink:
        yield Run(sink, Database(databases, name))


@pytest.fixture
def dedup(databases: Settings) -> Iterator[Run]:
    with _run(databases, "dedup") as run:
        yield run


@pytest.fixture
def naive(databases: Settings) -> Iterator[Run]:
    with _run(databases, "naive") as run:
        yield run


@checked
@given(deliveries)
@example([Delivery([0, 0], 0), Delivery([0], 1)])
def test_dedup_applies_each_event_once_however_it_comes(dedup: Run, batches: list[Delivery]) -> None:
    came = dedup.deliver(batches)
    assert dedup.balances() == sums(dict.fromkeys(came))


@checked
@given(deliveries)
@example([Delivery([0, 0], 0), Delivery([0], 1)])
def test_naive_drifts_by_exactly_the_surplus(naive: Run, batches: list[Delivery]) -> None:
    came = naive.deliver(batches)
    assert naive.balances() == sums(came)


def test_naive_is_shown_drifting(naive: Run) -> None:
    came = naive.deliver([Delivery([0, 1], 0), Delivery([1], 1)])
    assert naive.balances() != sums(dict.fromkeys(came))
