"""Strategy `versions`: what is remembered of each key, however its versions come, and who gets a version of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outbox.base.settings import Settings
from outbox.sink import discovery
from outbox.sink.repair.replay import Replayed
from outbox.sink.writer import Counts
from tests.support.deliveries import checked
from tests.support.made_events import TOPIC, TOPIC_ID, Event, batch, nth_key, sums, uuid7
from tests.support.sink_driver import Database, open_sink, replayed

RANDOM = Random(23)  # noqa: S311
NAME = "versions"
REPEATED = "repeated version"
LOWEST, HIGHEST = -(2**63), 2**63 - 1
BOUNDS = (LOWEST, LOWEST + 1, -1, 0, 1, HIGHEST - 2, HIGHEST - 1, HIGHEST)
Feed = Callable[..., Counts]


def event(version: int, quantity: int = 1) -> Event:
    """An event with an id of its own."""
    return Event(uuid7(RANDOM), nth_key(1), quantity, version)


def ranges(versions: Sequence[int]) -> str:
    """Versions as Postgres writes an int8multirange."""
    found: list[list[int]] = []
    for version in sorted({*versions}):
        if found and found[-1][1] == version:
            found[-1][1] = version + 1
        else:
            found.append([version, version + 1])
    shown = ",".join(f"[{low},{'' if high > HIGHEST else high})" for low, high in found)
    return f"{{{shown}}}"


@pytest.fixture
def database(databases: Settings) -> Database:
    return Database(databases, NAME)


@pytest.fixture
def feed(databases: Settings) -> Iterator[Feed]:
    """Delivers events to a sink, one batch after the other."""
    with open_sink(databases, NAME) as sink:
        yield lambda *events: sink.apply(batch(events, sink.positions(TOPIC, TOPIC_ID).get(0, 0)))


@dataclass
class Model:
    """A model of the strategy, event by event."""

    known: set[tuple[str, int]] = field(default_factory=set)
    letters: set[str] = field(default_factory=set)
    applied: list[Event] = field(default_factory=list)

    def deliver(self, events: Sequence[Event]) -> Counts:
        """A batch."""
        before, first = frozenset(self.known), dict[tuple[str, int], Event]()
        applied, rejected = 0, set[str]()
        for one in events:
            place = one.key, one.version
            if one.event_id in self.letters or place in before:
                continue
            if place not in first:
                first[place] = one
                self.known.add(place)
                self.applied.append(one)
                applied += 1
            elif first[place].event_id != one.event_id:
                rejected.add(one.event_id)
        self.letters |= rejected
        return Counts(len(events), applied, len(events) - applied - len(rejected), len(rejected))


# Neighbours at both bounds and around 0, so that ranges meet; each version has events of two ids.
numbered = st.tuples(st.integers(0, 1), st.sampled_from([*BOUNDS, *range(2, 9)]), st.sampled_from([0, 0, 0, 1]))
batches = st.lists(st.lists(numbered, max_size=14), min_size=1, max_size=5)


@checked
@given(batches)
@example([[(0, HIGHEST, 0), (0, HIGHEST, 1)], [(0, HIGHEST - 1, 0), (0, HIGHEST, 0)], [(0, LOWEST, 0)]])
@example([[(0, version, 0) for version in (1, 2, 3)], [(0, version, 0) for version in (3, 4)], [(0, 4, 1)]])
@example([[(0, 1, 0), (0, 3, 0)], [(0, 2, 0), (1, 2, 0)], [(0, 1, 0), (0, 2, 0), (0, 3, 0)]])
def test_versions_are_applied_once_in_any_order(
    feed: Feed, database: Database, made: list[list[tuple[int, int, int]]]
) -> None:
    model, events, keys = Model(), dict[tuple[int, int, int], Event](), [nth_key(RANDOM.getrandbits(60)) for _ in "01"]
    for numbers in made:
        for one in numbers:
            events.setdefault(one, replace(event(one[1], quantity=RANDOM.getrandbits(20) + 1), key=keys[one[0]]))
        chosen = [events[one] for one in numbers]
        assert feed(*chosen) == model.deliver(chosen)
    totals = database.totals()
    assert {key: totals[key] for key in keys if key in totals} == sums(model.applied)
    letters = database.dead_letters()
    assert {one.event_id for one in events.values() if one.event_id in letters} == model.letters
    found = database.query("SELECT key, versions::text FROM applied_versions WHERE key = ANY(%s)", keys)
    expected = {key: [version for of, version in model.known if of == key] for key in keys}
    assert sorted(found) == [(key, ranges(versions)) for key, versions in sorted(expected.items()) if versions]


def test_thousands_of_gaps_are_filled_in_any_order(feed: Feed, database: Database) -> None:
    history = [event(version) for version in range(1, 10_001)]
    assert feed(*history[::2]) == Counts(5000, 5000)
    remembered = "SELECT versions::text FROM applied_versions"
    assert database.query(remembered) == [(ranges(range(1, 10_001, 2)),)]
    late = RANDOM.sample(history[1::2], 5000)
    assert feed(*late[:2500]) == Counts(2500, 2500)
    assert feed(*history, *late[:2500]) == Counts(12_500, 2500, 10_000)
    assert database.query(remembered) == [("{[1,10001)}",)]
    assert database.totals() == sums(history)


def test_of_two_events_with_one_version_the_second_is_set_aside(
    databases: Settings, feed: Feed, database: Database
) -> None:
    first, second, other = event(1, 5), event(1, 6), event(2, 7)
    assert feed(first, second, other, first, second) == Counts(5, 2, 2, 1)
    assert database.dead_letters() == {second.event_id: REPEATED}
    ((detail,),) = database.query("SELECT detail FROM dead_letters")
    assert first.event_id in str(detail)
    assert feed(second, first) == Counts(2, 0, 2)
    assert database.totals() == sums([first, other])
    # A person decides whether it counts.
    assert replayed(databases, discovery.sinks(databases)[NAME]) == Replayed(applied=1)
    assert feed(second, first) == Counts(2, 0, 2)
    assert database.totals() == sums([first, second, other])


@pytest.mark.parametrize("at_once", [True, False])
def test_an_id_that_comes_again_with_another_version_is_another_event(
    feed: Feed, database: Database, at_once: bool
) -> None:
    first = event(1, 5)
    again = replace(first, version=2, quantity=6)
    for some in [[first, again]] if at_once else [[first], [again]]:
        assert feed(*some) == Counts(len(some), len(some))
    assert feed(first, again) == Counts(2, 0, 2)
    assert database.totals() == sums([first, again])
