"""Generated deliveries, and what each strategy promises to make of them: pure models of their results.

A new strategy is one row of PROMISES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from outbox.sink.writer import SinkWriter
from tests.support.made_events import TOPIC, TOPIC_ID, Event, batch, nth_key, sums, uuid7

KEYS, EVENTS = 4, 16


def pool() -> list[Event]:
    """Events whose quantities are such that no two mistakes cancel; the n-th of a key has version n."""
    ids, made, total = Random(20), list[Event](), [0] * KEYS  # noqa: S311
    for number in range(EVENTS):
        total[number % KEYS] += 5**number
        made.append(
            Event(
                event_id=uuid7(ids, at_ms=1_790_000_000_000 + number),
                key=nth_key(number % KEYS),
                quantity=5**number,
                version=number // KEYS + 1,
                total_after=total[number % KEYS],
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
    newest = {one.event.key: one.event for one in sorted(came, key=lambda one: one.event.version)}
    return {key: event.total_after for key, event in newest.items()}


class Promise(NamedTuple):
    """The result of a strategy for a delivery, and whether it is right although events are read, or sent, again."""

    model: Model
    re_reads: bool
    re_sends: bool


PROMISES = {
    "dedup": Promise(each_event_once, re_reads=True, re_sends=True),
    "merge": Promise(each_event_once, re_reads=True, re_sends=True),
    "upsert": Promise(newest_state, re_reads=True, re_sends=True),
    "versions": Promise(each_event_once, re_reads=True, re_sends=True),
    "offsets": Promise(lambda came: sums(one.event for one in came if one.is_new), re_reads=True, re_sends=False),
    "naive": Promise(lambda came: sums(one.event for one in came), re_reads=False, re_sends=False),
}
SURVIVES_RE_SENDS = [name for name, promise in PROMISES.items() if promise.re_sends]

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

    def __init__(self, sink: SinkWriter, totals: Callable[[], Mapping[str, int]]) -> None:
        """``totals`` tells what the sink holds."""
        self.sink = sink
        self._totals = totals
        self.generation = 0

    def deliver(self, batches: Sequence[Delivery]) -> list[Came]:
        """Deliver to keys and ids that no example used before; return the events in the order they came."""
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

    def totals(self) -> dict[str, int]:
        """The totals of this example's keys."""
        ours = {self.ours(event).key for event in POOL}
        return {key: total for key, total in self._totals().items() if key in ours}

    def ours(self, event: Event) -> Event:
        """The event with an id and a key of this example's."""
        shift = self.generation << 8
        return replace(
            event,
            event_id=event.event_id[:24] + f"{int(event.event_id[24:], 16) ^ shift:012x}",
            key=nth_key(int(event.key[-4:], 16) + shift),
        )
