"""A target that is a function: it gets the new events of a batch, and writes them wherever it likes.

    def write(events: pa.Table) -> None: ...

The sink's transaction goes as for tables of the sink database, with the function in place of the projections: the
strategy finds the new events, the function writes them, and then ids, dead letters and positions are committed. If the
process ends in between, the same events come again, maybe with others beside them. So the function must be an upsert on
a stable key that no older version replaces.

The transaction is open while the function runs. Postgres ends it after the `idle_in_transaction_session_timeout` of the
sinks' role (`outbox.migrations.roles`), which is a minute.

The module may have two more functions: ``totals`` returns what `outbox check` compares, and ``erase`` removes a key.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.heavy import extensions, pa, pc
from outbox.base.settings import Settings, SinkRole
from outbox.events.schema import shortened
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.applying.postgres.transforming import Apply, ElsewhereApplier
from outbox.sink.decoding.batch import Batch
from outbox.sink.remembering import positions
from outbox.sink.spec import (
    SinkSpec,
    Target,
    TargetState,
    Transformed,
    first_line,
    function_of,
    module_of,
    unusable,
)

if TYPE_CHECKING:
    from outbox.sink.decoding.binary import Encoded
    from outbox.sink.decoding.records import Fetch

TARGET_REFUSED = "target refused"
RETURNED = "let it return nothing, or by event id the reason for which it cannot write the event"
KEEPS_EVENTS = "landed_events"  # the table of strategy `merge`
NEW = 'SELECT new.partition, array_agg(new."offset") FROM pg_temp.new_events AS new GROUP BY new.partition'

Totals = Iterable[tuple[Any, Any, Any]]
Refused = Mapping[str, str]  # by event id, why the function cannot write it


@dataclass(frozen=True)
class FunctionTarget(Target):
    """A function, written as ``module:function``."""

    name: str
    is_elsewhere = True
    keeps = "former states in the places that functions write to: time travel, backups"
    takes_projections = False
    rebuilt_from = ("topic",)
    not_rebuilt = (
        "writes events, and a state of the source is not one",
        "`outbox rebuild {} --from topic` calls its target for all events again",
    )

    def other(self, spec: SinkSpec, name: str) -> Callable[..., Any] | None:
        """Another function of the module, if it has one of this name. Raises Failure if it cannot be imported."""
        return getattr(module_of(spec.job, "target", self.name), name, None)

    def require_usable(self, spec: SinkSpec) -> None:
        if importlib.util.find_spec("pyarrow") is None:
            what = f"sink {spec.name}: a target that is a function gets tables of pyarrow, which is not installed"
            raise Failure(what, "pip install 'pyarrow>=20'; the extra `sink` has it", code="package-missing")
        super().require_usable(spec)
        memory = spec.strategy.memory
        if memory is not None and memory.table == KEEPS_EVENTS:
            raise unusable(spec.job, f"strategy {spec.strategy.name} keeps events in the sink database", "use dedup")
        function_of(spec.job, "target", self.name)

    def writer(
        self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch
    ) -> PostgresWriter:
        self.require_usable(spec)
        return PostgresWriter(connection, spec, fetch, lambda _: self.applier(settings, spec))

    def applier(self, settings: Settings, spec: SinkSpec, transform: Transformed | None = None) -> FunctionApplier:
        del settings
        self.require_usable(spec)
        return FunctionApplier(spec, self, None if transform is None else transform.apply)

    def erase(self, settings: Settings, spec: SinkSpec, topic: str, key: str, *, dry_run: bool) -> Mapping[str, int]:
        del settings
        function = self.other(spec, "erase")
        if function is not None:
            rows = self._call(spec, lambda: int(function(key=key, topic=topic, dry_run=dry_run) or 0))
            if rows < 0:  # a `rowcount` that the place does not know
                raise self._wrong(spec, f"has a function erase that returns {rows}", "let it return the number of rows")
            return {f"target {self.name}": rows}
        if not spec.decoders[topic].is_personal:
            return {}
        raise Failure(
            f"sink {spec.name}: its events have personal data, and the module of {self.name} has no function erase",
            "write it: def erase(key, topic, *, dry_run), which returns the number of rows",
            code="erase-unsupported",
        )

    def state(self, settings: Settings, spec: SinkSpec) -> TargetState:
        """The totals. They are read after the positions, and may have events behind those."""
        if self.other(spec, "totals") is None:
            return TargetState(unread=f"the module of {self.name} has no function totals")
        with closing(connect(settings, SinkRole.AUDITOR)) as connection, connection, connection.cursor() as cursor:
            reached = positions.read_all(cursor, spec.name)
        return TargetState(reached, self.totals(spec), may_be_ahead=True)

    def totals(self, spec: SinkSpec) -> Totals:
        """By key its total and version, as the module's ``totals`` returns them. Raises Failure if that fails."""
        try:
            for key, total, version in module_of(spec.job, "target", self.name).totals():
                yield key, _finite(total or 0), None if version is None else _whole(version)
        except Exception as error:
            raise self._failed(spec, error) from error

    def write(self, spec: SinkSpec, events: pa.Table) -> Refused:
        """Let the function write these events, which all are new. Returns by event why it cannot write it.

        Raises Failure `target-failed` if it raises an error, and `target-wrong` if it returns something else.
        """
        refused = self._call(spec, function_of(spec.job, "target", self.name), events)
        if refused is None:
            return {}
        if not isinstance(refused, Mapping) or not all(isinstance(reason, str) for reason in refused.values()):
            raise self._wrong(spec, f"returns {type(refused).__name__}")
        if unknown := refused.keys() - {*events["event_id"].to_pylist()}:
            one = "something" if spec.is_personal else shortened(min(map(str, unknown)))
            raise self._wrong(spec, f"refuses {one}, which is no event of the batch")
        return {event_id: shortened(reason) for event_id, reason in refused.items()}

    def _call(self, spec: SinkSpec, function: Callable[..., Any], *arguments: object) -> Any:
        try:
            return function(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: it would end a thread without a word
            raise self._failed(spec, error) from error

    def _failed(self, spec: SinkSpec, error: BaseException) -> Failure:
        said = type(error).__name__ if spec.is_personal else first_line(error)
        file = inspect.getsourcefile(sys.modules[self.name.partition(":")[0]])
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f" in line {lines[-1]}" if lines else ""
        remedy = "correct it, or what it writes to; it gets the same events again"
        return Failure(f"sink {spec.name}: its target {self.name} failed{where}: {said}", remedy, code="target-failed")

    def _wrong(self, spec: SinkSpec, problem: str, remedy: str = RETURNED) -> Failure:
        return Failure(f"sink {spec.name}: its target {self.name} {problem}", remedy, code="target-wrong")


class FunctionApplier(ElsewhereApplier):
    """Lets the function write what is new."""

    _events: pa.Table  # of the batch, as the function gets them

    def __init__(self, spec: SinkSpec, target: FunctionTarget, transform: Apply | None = None) -> None:
        super().__init__(spec, transform)
        self._spec, self._target = spec, target

    def rows(self, batch: Batch) -> Sequence[Encoded]:
        self._events = batch.frame
        return super().rows(batch)

    def _project(self, cursor: extensions.cursor, parameters: Mapping[str, Any]) -> bool:
        del parameters
        return self._refuse(cursor, TARGET_REFUSED, self._target.write(self._spec, self._new(cursor)))

    def _new(self, cursor: extensions.cursor) -> pa.Table:
        """The new events, in the order of the topic."""
        cursor.execute(NEW)
        is_new = pa.repeat(False, self._events.num_rows)
        for partition, offsets in cursor:
            is_there = pc.is_in(self._events["offset"], pa.array(offsets, pa.int64()))
            is_new = pc.or_(is_new, pc.and_(is_there, pc.equal(self._events["partition"], partition)))
        return self._events.filter(is_new).sort_by([("partition", "ascending"), ("offset", "ascending")])


def newest(events: pa.Table, *, key: str, version: str) -> pa.Table:
    """Of each key the event with the highest version, and of several with that version the last one. Any version is
    higher than none.
    """
    order = [pc.is_valid(events[version]), *(events[name] for name in (version, "partition", "offset"))]
    names = ["is_known", "version", "partition", "offset"]
    ordered = events.take(pc.sort_indices(pa.table(order, names), [(name, "ascending") for name in names]))
    rows = pa.table({"key": ordered[key], "row": pa.array(range(ordered.num_rows), pa.int64())})
    last = rows.group_by("key").aggregate([("row", "max")])
    return ordered.take(last["row_max"].sort())


def _finite(total: Any) -> Decimal:
    number = Decimal(total)
    if not number.is_finite():
        raise ValueError("a total is no number")
    return number


def _whole(version: Any) -> int:
    if _finite(version) % 1:
        raise ValueError("a version is no integer")
    return int(version)
