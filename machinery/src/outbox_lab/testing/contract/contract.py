"""The contract test: every sink of the project gives one result, however its events are delivered.

Each example is a history. It is delivered once in order, which gives the reference, and then in each other way. The
first difference fails the test, and Hypothesis looks for a shorter history with a difference in the same way.

A domain allows fewer histories than its schemas do. One that violates a constraint of the database is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from random import SystemRandom

import hypothesis
import psycopg2
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.sink import discovery
from outbox.sink.applying.function import FunctionTarget
from outbox.sink.applying.handlers.target import HandlerTarget
from outbox.sink.applying.postgres.target import PostgresTarget
from outbox.sink.spec import SinkSpec
from outbox_lab.testing.contract import ways
from outbox_lab.testing.contract.delivery import transformed
from outbox_lab.testing.contract.events import History, Lifecycle, histories
from outbox_lab.testing.contract.result import FunctionPlace, Reader, Result, difference, opened
from outbox_lab.testing.contract.ways import Case, Subject, Way
from outbox_lab.testing.fixtures.spark import leaves_sockets

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
    with opened(settings) as database, ExitStack() as stack:
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
        spec = subject.spec
        self._place = (
            FunctionPlace(subject.database.settings, spec, spec.target)
            if isinstance(spec.target, FunctionTarget)
            else None
        )
        self._delivered: set[tuple[str, str]] = set()  # topics and keys that the place has
        self._ways: list[Way] = ways.survived_by(subject.spec)
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
                ways.once(delivery, history)
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
        found = self._reader.read(self._name)
        return found if self._place is None else {**found, **self._place.read()}

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
