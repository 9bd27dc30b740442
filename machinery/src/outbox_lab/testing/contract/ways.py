"""The ways to deliver a history. Each must give what one delivery in order gives, if the sink's strategy promises it:
`recognises` says which repeats a strategy recognises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import pyarrow as pa

from outbox.sink.applying.function import FunctionTarget
from outbox.sink.applying.handlers.target import HandlerTarget
from outbox.sink.spec import SinkSpec, Transformed
from outbox_lab.testing.contract.delivery import Delivery, Placed, after, placed
from outbox_lab.testing.contract.events import History, Sent
from outbox_lab.testing.contract.result import LETTERS, Database, Result

Repeats = Literal["none", "re-reads", "all"]

ORDER: Sequence[Repeats] = ("none", "re-reads", "all")
PARTITIONS = 2
MOVED_TO, MOVED_BY = 1000, 3  # offsets
BESIDE = "contract-beside"


class Subject(NamedTuple):
    """A sink, and where it is delivered to."""

    database: Database
    spec: SinkSpec
    transform: Transformed | None = None

    def delivering(self) -> AbstractContextManager[Delivery]:
        """Deliveries to it."""
        return closing(Delivery(self.database, self.spec, self.transform))

    @property
    def function(self) -> FunctionTarget:
        """Its target, which is a function."""
        assert isinstance(self.spec.target, FunctionTarget)
        return self.spec.target


class Case(NamedTuple):
    """A history for a sink, and the result of its delivery in order."""

    subject: Subject
    history: History
    reference: Result

    @property
    def placed(self) -> list[Placed]:
        """The events, one after the other on their topics."""
        return placed(self.history.sent)

    @property
    def batches(self) -> list[list[Placed]]:
        """The events in batches that end by chance; in two at least, if there are two events."""
        return _batches(self.placed)


class Way(NamedTuple):
    """A way to deliver a history, and why its result usually differs if it does."""

    name: str
    cause: str
    deliver: Callable[[Delivery, Case], None]
    repeats: Repeats = "none"
    is_late: bool = False  # events of a key are applied in another order
    has_copy: bool = False  # there is another sink of the job
    is_of_function: bool = False  # it is about the time between a target's function and the commit


class ProcessEnds(Exception):
    """Ends a batch where a process would end."""


@dataclass(frozen=True)
class EndingTarget(FunctionTarget):
    """Lets the function write all events of a batch, or only the first half, and then ends the process."""

    writes_half: bool = False
    written: list[pa.Table] = field(default_factory=list)

    def write(self, spec: SinkSpec, events: pa.Table) -> dict[str, str]:
        some = events.slice(0, (events.num_rows + 1) // 2) if self.writes_half else events
        super().write(spec, some)
        self.written.append(some)
        raise ProcessEnds


def survived_by(spec: SinkSpec) -> list[Way]:
    """The ways that a sink promises to survive.

    A strategy that applies states drops an event that comes after a newer one, so it does not promise to apply all. A
    handler or a target's function has no copy: it does not know for which of them it is called.
    """
    return [
        way
        for way in WAYS
        if ORDER.index(way.repeats) <= ORDER.index(spec.strategy.repeats)
        and not (way.is_late and spec.strategy.takes == "states")
        and not (way.has_copy and isinstance(spec.target, HandlerTarget | FunctionTarget))
        and not (way.is_of_function and not isinstance(spec.target, FunctionTarget))
    ]


def once(delivery: Delivery, history: History) -> None:
    """The reference: each event once, in order, in one batch of each topic."""
    delivery.apply(placed(history.sent))


def _one_by_one(delivery: Delivery, case: Case) -> None:
    for one in case.placed:
        delivery.apply([one])


def _cut(delivery: Delivery, case: Case) -> None:
    for batch in case.batches:
        delivery.apply(batch)


def _interleaved(delivery: Delivery, case: Case) -> None:
    """The keys in two partitions, and their events in turn, in an order that their chances decide."""
    of_keys: dict[tuple[str, str], list[Sent]] = {}
    for one in case.history.sent:
        of_keys.setdefault((one.topic, one.key), []).append(one)
    last_first = [*reversed(of_keys)]
    partitions = {key: number % PARTITIONS for number, key in enumerate(last_first)}
    mixed, next_ = list[Placed](), Counter[tuple[str, int]]()
    while waiting := [key for key in last_first if of_keys[key]]:
        key = min(waiting, key=lambda one: of_keys[one][0].chance)
        place = (key[0], partitions[key])
        mixed.append(Placed(of_keys[key].pop(0), partitions[key], next_[place]))
        next_[place] += 1
    for batch in _batches(mixed):
        delivery.apply(batch)


def _resent(delivery: Delivery, case: Case) -> None:
    delivery.apply(case.placed)
    delivery.apply(placed(case.history.sent, after(case.placed)))


def _crashed(delivery: Delivery, case: Case) -> None:
    for batch in case.batches:
        delivery.apply(batch)
        delivery.restart()
        delivery.apply(batch)


def _rewound(delivery: Delivery, case: Case) -> None:
    _cut(delivery, case)
    delivery.restart()
    delivery.apply(case.placed)


def _replayed(delivery: Delivery, case: Case) -> None:
    """Any events become dead letters first, of keys that have none in the reference: if the sink refuses an event
    because of an earlier one, it may refuse the earlier one if that comes later.
    """
    letters = {place.key for place in case.reference if place.table == LETTERS}
    refused = {one.key for one in case.history.sent if f"event {one.event_id}" in letters}
    set_aside = {one.event_id for one in case.history.sent if one.key not in refused and one.is_set_aside}
    for batch in case.batches:
        delivery.apply(batch, set_aside)
    delivery.replay()


def _rebuilt(delivery: Delivery, case: Case) -> None:
    _cut(delivery, case)
    delivery.rebuild(case.placed)


def _ended(delivery: Delivery, case: Case) -> None:
    """The process ends when the function has written half of a batch, again when it has written all, and goes on."""
    for batch in case.batches:
        for writes_half in (True, False):
            _until_it_ends(case.subject, batch, writes_half=writes_half)
        delivery.apply(batch)
        delivery.restart()


def _written_late(delivery: Delivery, case: Case) -> None:
    """A driver that has lost its connection writes the first batch when its successor has applied all of them."""
    late = [events for batch in case.batches[:1] for events in _until_it_ends(case.subject, batch)]
    _cut(delivery, case)
    for events in late:
        case.subject.function.write(case.subject.spec, events)


def _until_it_ends(subject: Subject, batch: Sequence[Placed], *, writes_half: bool = False) -> Sequence[pa.Table]:
    """Deliver a batch to a process that ends behind the function. Returns what that has written."""
    target = EndingTarget(subject.function.name, writes_half)
    spec = replace(subject.spec, target=target)
    with suppress(ProcessEnds), subject._replace(spec=spec).delivering() as delivery:
        delivery.apply(batch)
    return target.written


def _beside(delivery: Delivery, case: Case) -> None:
    """Another sink of the job takes the same events in turn with the first."""
    beside = case.subject._replace(spec=replace(case.subject.spec, name=BESIDE))
    with beside.delivering() as other:
        takes_turn = [other, delivery]
        for batch in case.batches:
            for one in takes_turn:
                one.apply(batch)
            takes_turn.reverse()


def _batches(events: Sequence[Placed]) -> list[list[Placed]]:
    ends = [number for number, one in enumerate(events, 1) if one.sent.ends_batch]
    middle = [len(events) // 2] if len(events) > 1 and not {*ends} - {len(events)} else []
    cuts = sorted({0, *ends, *middle, len(events)})
    return [list(events[begin:end]) for begin, end in pairwise(cuts)]


READS_BATCH = "the projection reads `batch` instead of `new_events`"
READS_OR_COUNTS = f"{READS_BATCH}, or counts batches"
CUTS = "the projection counts batches, keeps the first or last event of a batch, or depends on the order of rows"
WAYS: Sequence[Way] = (
    Way(
        "the same again",
        "now(), random() or another value that the events do not determine",
        lambda delivery, case: once(delivery, case.history),
    ),
    Way(
        "at other offsets",
        "the projection uses offset or partition as a value",
        lambda delivery, case: delivery.apply(placed(case.history.sent, MOVED_TO, step=MOVED_BY, partition=1)),
    ),
    Way("one event per batch", CUTS, _one_by_one),
    Way("in other batches", CUTS, _cut),
    Way(
        "with the keys interleaved otherwise",
        "the projection depends on the order of rows, on a sequence, or on the events of other keys",
        _interleaved,
    ),
    Way(
        "beside another sink of the job",
        "a row is written, read or deleted without the column sink, the table's key lacks it, or there is a sequence",
        _beside,
        has_copy=True,
    ),
    Way(
        "each event twice in a batch",
        READS_BATCH,
        lambda delivery, case: delivery.apply(placed([copy for one in case.history.sent for copy in (one, one)])),
        "all",
    ),
    Way("sent again at later offsets", READS_BATCH, _resent, "all"),
    Way("each batch again after a crash", READS_OR_COUNTS, _crashed, "re-reads"),
    Way("rewound to the first offset", READS_OR_COUNTS, _rewound, "re-reads"),
    Way(
        "some as dead letters, then replayed",
        "a replayed event replaces younger ones of its key: compare versions, or write `-- ordered`",
        _replayed,
        is_late=True,
    ),
    Way(
        "the process ends between target and commit",
        "the target adds up: make it an upsert on a stable key",
        _ended,
        is_of_function=True,
    ),
    Way(
        "written late by a driver that was cut off",
        "an older version replaces a newer one: compare versions",
        _written_late,
        is_of_function=True,
    ),
    Way(
        "rebuilt from the topic",
        "the projection uses a sequence, or reads or writes rows without the column sink",
        _rebuilt,
        has_copy=True,
    ),
)
