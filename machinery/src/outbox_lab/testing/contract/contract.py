"""The contract test: every sink of the project gives one result, however its events are delivered.

Each example is a history. It is delivered once in order, which gives the reference, and then in each other way that the
sink's strategy promises to survive: `recognises` says which repeats a strategy recognises. The first difference fails
the test, and Hypothesis looks for a shorter history with a difference in the same way.

A domain allows fewer histories than its schemas do. One that violates a constraint of the database is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import SystemRandom
from typing import Literal, NamedTuple

import hypothesis
import psycopg2
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.sink import discovery
from outbox.sink.applying.function import FunctionTarget
from outbox.sink.applying.handlers.target import HandlerTarget
from outbox.sink.applying.postgres.target import PostgresTarget
from outbox.sink.spec import SinkSpec, Transformed
from outbox_lab.testing.contract.delivery import (
    LETTERS,
    Database,
    Delivery,
    FunctionPlace,
    Placed,
    Reader,
    Result,
    after,
    difference,
    placed,
    transformed,
)
from outbox_lab.testing.contract.events import History, Lifecycle, Sent, histories
from outbox_lab.testing.fixtures.spark import leaves_sockets

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


def _in_order(delivery: Delivery, history: History) -> None:
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
        delivery.close()
        delivery.apply(batch)


def _rewound(delivery: Delivery, case: Case) -> None:
    _cut(delivery, case)
    delivery.close()
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
        delivery.close()


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
        lambda delivery, case: _in_order(delivery, case.history),
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


FreshDatabases = Callable[[], AbstractContextManager[Settings]]

EXAMPLES = 8
TRANSFORMED_SHARE = 4  # of the examples: Spark takes its time for each batch
CONSTRAINTS = "23"  # the class of SQLSTATEs of violated constraints
FUNCTIONS = ("totals", "erase")  # that a function's module needs beside it
SEEDS = 2**32
SEARCHED_MAX = 1000
SHRINKING_MAX = 150  # histories; each takes a fifth of a second


def contract(
    *, begins: Collection[str] = (), once: Collection[str] = (), examples: int = EXAMPLES
) -> Callable[..., None]:
    """The test of the contract, for a domain that has fewer histories than its schemas allow.

    ``begins`` are events that the first event of a key is one of, such as ``order.placed``; they concern the aggregates
    that they are of. ``once`` are events that a key has once at most. ``examples`` is the number of histories per sink;
    one with a transform has a quarter of them.
    """
    lifecycle = Lifecycle(frozenset(begins), frozenset(once))

    @leaves_sockets
    @pytest.mark.each_sink
    def test(sink: str, fresh_databases: FreshDatabases, request: pytest.FixtureRequest) -> None:
        """Every way to deliver a sink's events gives the same result."""
        with fresh_databases() as settings:
            chosen = discovery.chosen(settings, sink)
            reason = untestable(chosen)
            if reason is not None:
                pytest.skip(reason)
            given = request.config.getoption("--hypothesis-seed", None)
            seed = SystemRandom().randrange(SEEDS) if given is None else given
            problem = ""
            try:
                keep(settings, chosen, seed=seed, lifecycle=lifecycle, examples=examples)
            except AssertionError as error:
                problem = str(error)
        if problem:
            pytest.fail(problem, pytrace=False)  # the lines of this package explain nothing

    return test


def untestable(sink: SinkSpec) -> str | None:
    """Why a sink is left out, if it is."""
    if not sink.job.events:
        return f"sink {sink.name} reads records that no schema declares"
    if isinstance(sink.target, FunctionTarget):
        sink.target.require_usable(sink)
        lacking = [name for name in FUNCTIONS if sink.target.other(sink, name) is None]
        return f"the module of {sink.target.name} has no function {' and no '.join(lacking)}" if lacking else None
    if not isinstance(sink.target, PostgresTarget | HandlerTarget):
        return f"the result of sink {sink.name} is not in the sink database"
    return None


def keep(
    settings: Settings,
    sink: SinkSpec,
    *,
    seed: object,
    lifecycle: Lifecycle = Lifecycle(),  # noqa: B008 - frozen
    examples: int = EXAMPLES,
    shrinking_max: int = SHRINKING_MAX,
) -> None:
    """Require that a sink keeps the contract. ``settings`` are those of fresh databases. ``shrinking_max`` is how many
    histories are tried to find a shorter one.

    Raises AssertionError that names the sink, the way, the table, the row and both values, and prints the history.
    """
    with closing(connect(settings, SinkRole.OWNER)) as owner, ExitStack() as stack:
        database = Database(settings, owner)
        subject = Subject(database, sink)
        if sink.job.transform is not None:
            subject = subject._replace(transform=stack.enter_context(transformed(sink, database)))
            examples = max(1, examples // TRANSFORMED_SHARE)
        _Contract(subject, seed, shrinking_max).check(histories(settings, sink, lifecycle), examples)


class _Enough(BaseException):
    """Ends a search of Hypothesis at once, which an Exception would not."""


class _Contract:
    """The contract of one sink."""

    def __init__(self, subject: Subject, seed: object, shrinking_max: int) -> None:
        self._subject, self._seed, self._shrinking_max = subject, seed, shrinking_max
        self._reader = Reader(subject.database.owner, subject.spec.strategy)
        spec, settings = subject.spec, subject.database.settings
        is_function = isinstance(spec.target, FunctionTarget)
        self._place = FunctionPlace(settings, spec, subject.function) if is_function else None
        self._delivered: set[tuple[str, str]] = set()  # topics and keys that the place has
        self._ways: list[Way] = survived_by(subject.spec)
        self._refusal = ""  # the last of a history that the database does not allow
        self._tried: dict[str, str] = {}  # by history, its problem
        self._shortest = ""  # the problem of the shortest history so far
        self._searched = self._shrinking = 0  # histories since the first that failed: drawn, and delivered

    def check(self, histories: SearchStrategy[History], examples: int) -> None:
        configured = hypothesis.settings(
            max_examples=examples,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        test = hypothesis.given(histories)(self._keeps)
        try:
            hypothesis.seed(self._seed)(configured(test))()
        except Unsatisfiable:
            raise AssertionError(
                f"sink {self._name}: the database refuses every history: {self._refusal}\n"
                'If not every event can be the first of a key, or come again, write contract(begins=["…"], once=["…"]).'
            ) from None
        except (AssertionError, _Enough):
            raise AssertionError(self._shortest) from None  # without the steps of Hypothesis
        finally:
            self._reset()

    def _keeps(self, history: History) -> None:
        """Raises AssertionError as `keep` does, and _Enough to end the search for a shorter history.

        No history is delivered twice.
        """
        identity = f"{history}{[one.chance for one in history.sent]}"
        self._searched += bool(self._shortest)
        if identity not in self._tried:
            self._shrinking += bool(self._shortest)
            if self._shrinking > self._shrinking_max or self._searched > SEARCHED_MAX:
                raise _Enough
            self._tried[identity] = self._problem(history)
        if self._tried[identity]:
            self._shortest = self._tried[identity]  # Hypothesis tries nothing longer than the last one that failed
            raise AssertionError(self._shortest)

    def _problem(self, history: History) -> str:
        """How the sink breaks the contract with a history; empty if it does not."""
        try:
            reference = self._reference(history)
            for way in self._ways:
                different = self._difference(way, history, reference)
                if different:
                    self._ways = [way]  # a shorter history must differ in the same way
                    return f"sink {self._name}, {way.name}: {different}\nUsually: {way.cause}.{self._appendix(history)}"
        except AssertionError as error:
            return str(error)
        except Failure as failure:  # of the functions that read and empty the place of a target
            return failure.message
        return ""

    def _reference(self, history: History) -> Result:
        """The result in order. A history that violates a constraint of the database is rejected."""
        self._reset(history)
        try:
            with self._subject.delivering() as delivery:
                _in_order(delivery, history)
        except Failure as failure:
            if self._is_refused(failure):
                hypothesis.reject()
            raise AssertionError(
                f"sink {self._name} stops at valid events, in order, in one batch: {failure.message}\n"
                "Usually: two events of a key in a batch without GROUP BY or DISTINCT ON; a column that is too small. "
                'If a key has the event once at most, write contract(once=["…"]).'
                f"{self._appendix(history)}"
            ) from failure
        return self._result()

    def _reset(self, history: History | None = None) -> None:
        """Empty the database and the target's place, for another delivery."""
        self._subject.database.reset()
        if self._place is not None:
            self._place.empty(self._delivered)
            self._delivered = {(one.topic, one.key) for one in history.sent} if history is not None else set()

    def _result(self) -> Result:
        return {**self._reader.read(self._name), **({} if self._place is None else self._place.read())}

    def _difference(self, way: Way, history: History, reference: Result) -> str:
        """How the result of a way differs; empty if it does not."""
        self._reset(history)
        try:
            with self._subject.delivering() as delivery:
                way.deliver(delivery, Case(self._subject, history, reference))
        except Failure as failure:
            return f"it stops: {failure.message}"
        return str(difference(reference, self._result()) or "")

    def _is_refused(self, failure: Failure) -> bool:
        """Whether a constraint was violated. A row without its sink is no matter of the domain."""
        cause = failure.__cause__
        if not isinstance(cause, psycopg2.Error) or not str(cause.pgcode).startswith(CONSTRAINTS):
            return False
        self._refusal = failure.message
        if cause.diag.column_name == "sink":
            raise AssertionError(
                f"sink {self._name}: {failure.message}\nUsually: the projection writes a row without the column sink."
            ) from failure
        return True

    @property
    def _name(self) -> str:
        return self._subject.spec.name

    def _appendix(self, history: History) -> str:
        return f"\nThe history:\n{history}\nRepeat it: pytest --hypothesis-seed={self._seed}"


test_sinks_keep_their_contract = contract()
