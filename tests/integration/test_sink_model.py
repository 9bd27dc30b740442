"""Generated deliveries to each strategy against a pure model: duplicated, reordered across accounts, cut into batches,
re-read, sent again. Those that promise to survive do; those that do not are shown failing.

A new strategy is one row of STRATEGY_MODELS: what the balances are after a delivery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outbox.database import connect
from outbox.settings import BalancesRole, Settings
from outbox.sink.apply import Sink
from tests.sink import (
    STRATEGIES,
    SURVIVES_RE_SENDS,
    TOPIC,
    TOPIC_ID,
    Database,
    Event,
    account,
    batch,
    open_sink,
    sink_on,
    sums,
    uuid7,
)

ACCOUNTS, EVENTS = 4, 16


def pool() -> list[Event]:
    """Events whose amounts are such that no two mistakes cancel; the n-th of an account has version n."""
    ids, made, balance = Random(20), list[Event](), [0] * ACCOUNTS  # noqa: S311
    for number in range(EVENTS):
        balance[number % ACCOUNTS] += 5**number
        made.append(
            Event(
                event_id=uuid7(ids, at_ms=1_790_000_000_000 + number),
                account_id=account(number % ACCOUNTS),
                amount=5**number,
                version=number // ACCOUNTS + 1,
                balance_after=balance[number % ACCOUNTS],
            )
        )
    return made


POOL = pool()


class Delivery(NamedTuple):
    """One batch: which events, and how many offsets before the position it starts (a re-read)."""

    events: list[int]
    back: int = 0


class Came(NamedTuple):
    """An event that came, and where on the topic. ``is_new`` if nothing had been read there."""

    event: Event
    is_new: bool


Model = Callable[[Sequence[Came]], Mapping[str, int]]


def each_event_once(came: Sequence[Came]) -> Mapping[str, int]:
    return sums(dict.fromkeys(one.event for one in came))


def newest_state(came: Sequence[Came]) -> Mapping[str, int]:
    newest = {one.event.account_id: one.event for one in sorted(came, key=lambda one: one.event.version)}
    return {key: event.balance_after for key, event in newest.items()}


def each_offset_once(came: Sequence[Came]) -> Mapping[str, int]:
    return sums(one.event for one in came if one.is_new)


def all_that_comes(came: Sequence[Came]) -> Mapping[str, int]:
    return sums(one.event for one in came)


STRATEGY_MODELS: dict[str, Model] = {
    "dedup": each_event_once,
    "merge": each_event_once,
    "upsert": newest_state,
    "offset-log": each_offset_once,
    "offsets": each_offset_once,
    "naive": all_that_comes,
}
SURVIVES_RE_READS = {"dedup", "merge", "upsert", "offset-log", "offsets"}

deliveries = st.lists(
    st.builds(Delivery, st.lists(st.integers(0, EVENTS - 1), max_size=12), st.integers(0, 5)), max_size=6
)
checked = settings(
    max_examples=40,
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

    def deliver(self, batches: Sequence[Delivery]) -> list[Came]:
        """Deliver to accounts and ids that no example used before; return the events in the order they came."""
        self.generation += 1
        return self.go_on(batches)

    def go_on(self, batches: Sequence[Delivery]) -> list[Came]:
        """Deliver more to the same example."""
        ours = [self.ours(event) for event in POOL]
        came = []
        position = self.sink.positions(TOPIC, TOPIC_ID).get(0, 0)
        for events, back in batches:
            chosen = [ours[number] for number in events]
            start = max(0, position - back)
            self.sink.apply(batch(chosen, start))
            came += [Came(event, start + place >= position) for place, event in enumerate(chosen)]
            position = max(position, start + len(chosen))
        return came

    def balances(self) -> dict[str, int]:
        """The balances of this example's accounts."""
        ours = {self.ours(event).account_id for event in POOL}
        return {key: total for key, total in self.database.balances().items() if key in ours}

    def ours(self, event: Event) -> Event:
        """The event with an id and an account of this example's."""
        shift = self.generation << 8
        return replace(
            event,
            event_id=event.event_id[:24] + f"{int(event.event_id[24:], 16) ^ shift:012x}",
            account_id=account(int(event.account_id[-4:], 16) + shift),
        )


@pytest.fixture
def run(databases: Settings, request: pytest.FixtureRequest) -> Iterator[Run]:
    with open_sink(databases, request.param) as sink:
        yield Run(sink, Database(databases, request.param))


each_strategy = pytest.mark.parametrize("run", STRATEGY_MODELS, indirect=True)


def test_each_strategy_has_its_model() -> None:
    assert set(STRATEGY_MODELS) == set(STRATEGIES)


@each_strategy
@checked
@given(deliveries)
@example([Delivery([0, 0]), Delivery([0], back=1)])
def test_a_strategy_does_what_its_model_says_however_events_come(run: Run, batches: list[Delivery]) -> None:
    came = run.deliver(batches)
    assert run.balances() == STRATEGY_MODELS[run.sink.name](came)


@each_strategy
def test_a_batch_that_is_read_again(run: Run) -> None:
    came = run.deliver([Delivery([0, 1, 4]), Delivery([0, 1, 4], back=3)])
    assert (run.balances() == each_event_once(came)) is (run.sink.name in SURVIVES_RE_READS)


@each_strategy
def test_events_that_are_sent_again(run: Run) -> None:
    came = run.deliver([Delivery([0, 1, 4]), Delivery([0, 1, 4])])
    assert (run.balances() == each_event_once(came)) is (run.sink.name in SURVIVES_RE_SENDS)


@each_strategy
def test_what_was_skipped_is_counted(run: Run) -> None:
    some = [run.ours(POOL[number]) for number in (0, 1, 4)]
    assert run.sink.apply(batch(some)).fresh == 3
    again = run.sink.apply(batch(some, start=3))
    assert again.duplicates == (3 if run.sink.name in SURVIVES_RE_SENDS else 0)


def test_a_guard_on_the_last_event_alone_goes_backwards(databases: Settings) -> None:
    """Why `upsert` compares versions: of several older events that come again, only the last would be known."""
    good = STRATEGIES["upsert"]
    guard = "version > coalesce(stored_version, 0)"
    assert guard in good.sql
    weak = replace(good, name="weak", sql=good.sql.replace(guard, "version IS DISTINCT FROM stored_version"))
    found = {}
    for one in (good, weak):
        with closing(connect(databases, BalancesRole.SINK)) as connection:
            run = Run(sink_on(connection, one), Database(databases, one.name))
            came = run.deliver([Delivery([0, 4, 8]), Delivery([0, 4], back=3)])
            found[one.name] = run.balances() == newest_state(came)
    assert found == {"upsert": True, "weak": False}
