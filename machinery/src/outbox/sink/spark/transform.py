"""A job's `transform`: a function of DataFrames, which its events pass before the projections, or a MERGE, see them.

The function gets the columns of `frame_schema`, and returns a DataFrame with those that the projections or the MERGE
want (docs/spark.md has an example). It is called for every batch, and for each part of a large one. The rules:

- ``event_id``, ``partition`` and ``offset`` stay as they are, so that each row is known by its event.
- An event has one row at most. An event without a row is filtered: the sink counts it, and passes it.
- The same event gives the same row, whatever other events are beside it: a batch that is repeated is cut into other
  parts. So no aggregates over events, which belong into a projection, and nothing of now or of chance.

A breach of the first two stops the sink, with nothing applied. A test tries all three:
`outbox_lab.testing.check_transform`.

An event for which the transform fails is found by halves and set aside as `transform failed`. Where more than
`FAILED_MAX` of a hundred fail, the transform is at fault, and the sink stops.

Records do not pass through the JVM as Spark's rows. Tasks read and decode them (`outbox.sink.spark.reader`), and the
driver gives Spark the events of a part, and takes back what the transform returns of them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa
from py4j.protocol import Py4JNetworkError
from pyspark.errors import PySparkException, PySparkTypeError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_type
from pyspark.sql.types import DataType, StringType, StructField, StructType

from outbox.base.errors import Failure, kind_of
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.events.schema import shortened
from outbox.sink.applying.postgres.transforming import columns_of, sql_type, storable
from outbox.sink.decoding.batch import Returned
from outbox.sink.decoding.layout import PLACE, Layout
from outbox.sink.spark.session import FEW_ROWS, JVM_GONE, session
from outbox.sink.spec import SinkSpec, Transformed, function_of, unusable
from outbox.sink.writer import Applier

TOPIC = "outbox_topic"  # no property has this name
# For small batches. Adaptive execution plans again after each stage, which takes longer than the query itself; so does
# a second task.
SMALL = {
    **FEW_ROWS,
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.leafNodeDefaultParallelism": "1",
    "spark.sql.shuffle.partitions": "1",
}
# For parts of large ones: Spark would make rows of less than 48 MB in its driver, and send each row to a task again. So
# tasks get what they get of more: Arrow's batches.
LARGE = {"spark.sql.execution.arrow.localRelationThreshold": "0"}
FAILED_MAX = 10  # of the events that the driver transforms at once
# Of an executor or of the whole job, and no fault of an event.
LOST = ("ExecutorLostFailure", "FetchFailed", "cancelled", "SparkContext was shut down", "OutOfMemoryError")

Function = Callable[[DataFrame], DataFrame]


class TransformFailed(Exception):
    """The transform, or what Spark evaluates of it, raises an error for one of some events."""


class Transform:
    """The transform of a sink."""

    def __init__(self, spark: SparkSession, spec: SinkSpec) -> None:
        """Import the transform. Raises Failure if that fails, or if it does not return what a sink can take."""
        self._spec, self._sink, self._name = spec, spec.name, str(spec.job.transform)
        self._function = self._load()
        self._schema = frame_schema(spec.layout)
        # Each has Spark's own settings beside ours, as the adopter knows them.
        self._large, self._small = _session(spark, LARGE), _session(spark, SMALL)
        self._tasks = spark.sparkContext.defaultParallelism
        self.returned = self._returned_schema()
        """The place of each event, and the columns that it returns."""

    @property
    def transformed(self) -> Transformed:
        """The transform for the events of dead letters."""
        return Transformed(self.returned, lambda topic, rows: self.apply(as_events(rows, topic)))

    def apply(self, events: pa.Table) -> Returned:
        """Transform the events of a small batch, which have the columns of `frame_schema`.

        Raises Failure if it fails for many of them.
        """
        found, failed = [self._storable(self.returned.empty_table())], dict[tuple[int, int], str]()
        waiting = [events] if events.num_rows else []
        while waiting:
            some = waiting.pop()
            try:
                found.append(self._rows(some, self._small))
            except TransformFailed as error:
                half = some.num_rows // 2
                if half:
                    waiting += [some.slice(half), some.slice(0, half)]
                    continue
                failed[some["partition"][0].as_py(), some["offset"][0].as_py()] = str(error)
                if len(failed) > FAILED_MAX or self._fails_for(events.slice(0, 0)):
                    raise self._failed(events, str(error)) from error
        return Returned(pa.concat_tables(found), failed)

    def apply_to_many(self, events: pa.Table) -> Returned:
        """Apply the transform to as many events as a part has. Raises TransformFailed if it fails for one of them."""
        return Returned(self._rows(events, self._large)) if events.num_rows else self.apply(events)

    def _rows(self, events: pa.Table, session: SparkSession) -> pa.Table:
        frame = session.createDataFrame(events, self._schema)
        if session is self._large:  # otherwise each of Arrow's batches is a task
            frame = frame.coalesce(self._tasks)
        returned = self._returned(frame)
        with self._errors():
            rows = returned.toArrow()
        try:
            return self._storable(rows.cast(self.returned))
        except ValueError as error:  # pa.ArrowInvalid is one
            said = "it returns a value that its column does not take" if self._spec.is_personal else str(error)
            raise TransformFailed(shortened(said)) from error

    def _storable(self, rows: pa.Table) -> pa.Table:
        if self._spec.target.is_elsewhere:
            return rows
        return storable(rows, columns_of(rows.schema, self._spec.layout))

    def _load(self) -> Function:
        if importlib.util.find_spec("pandas") is None:
            raise self._unusable("PySpark needs pandas for it, which is not installed", "pip install 'pandas>=2.2,<3'")
        return function_of(self._spec.job, "transform", self._name)

    def _returned_schema(self) -> pa.Schema:
        try:
            returned = self._function(self._small.createDataFrame([], self._schema))
            schema = returned.schema
        except Py4JNetworkError:
            raise  # the JVM is gone
        except Exception as error:
            raise self._unusable(f"it fails without any event: {_reason(error)}", "correct it") from error
        problem = not_storable(schema, self._schema)
        if problem is not None:
            raise self._unusable(*problem)
        types = {field.name: to_arrow_type(field.dataType) for field in schema.fields}
        return pa.schema({name: types[name] for name in (*PLACE, *types) if name != TOPIC})

    def _returned(self, events: DataFrame) -> DataFrame:
        """The DataFrame that it returns, with the columns in the order that we know.

        Raises Failure if it raises an error: it has not looked at an event yet, so none is to blame.
        """
        try:
            returned, names = self._function(events), self.returned.names
            if returned.columns == names:
                return returned  # one analysis less
            return returned.select([quoted(name) for name in names])
        except Py4JNetworkError:
            raise  # the JVM is gone
        except Exception as error:
            raise Failure(
                f"sink {self._sink}: its transform {self._name} fails before it looks at an event: "
                f"{shortened(_reason(error))}",
                "correct it, or what it reads; no event was applied",
                code="transform-failed",
            ) from error

    def _fails_for(self, events: pa.Table) -> bool:
        """Whether it fails for these. If it does for none, no event is to blame: a file that it reads may be gone."""
        try:
            self._rows(events, self._small)
        except TransformFailed:
            return True
        return False

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of Spark inside the block: the transform's become TransformFailed, others Failure."""
        try:
            yield
        except (PySparkException, *JVM_GONE) as error:
            text = _text(error)
            if not isinstance(error, PySparkException) or any(word in text for word in LOST):
                raise Failure(
                    f"sink {self._sink}: Spark cannot transform a batch: {spark_reason(error, self._spec)}",
                    "start the sink again",
                    code="spark-failed",
                ) from error
            raise TransformFailed(shortened(spark_reason(error, self._spec))) from error

    def _failed(self, events: pa.Table, detail: str) -> Failure:
        first = f"offset {events['offset'][0].as_py()} of partition {events['partition'][0].as_py()}"
        return Failure(
            f"sink {self._sink}: its transform {self._name} fails for many events of a batch, or without any event; "
            f"the first of them is at {first}: {detail}",
            "correct it, or what it reads; none of them was applied",
            code="transform-failed",
        )

    def _unusable(self, problem: str, remedy: str) -> Failure:
        return unusable(self._spec.job, f"its transform {self._name}: {problem}", remedy)


def applier(settings: Settings, spec: SinkSpec) -> Applier:
    """The applier of dead letters of a sink with a transform.

    Raises Failure if its transform cannot be used, or if Spark does not start.
    """
    target = spec.target
    transform = Transform(session(settings, [target]), spec)
    return target.applier(settings, spec, transform.transformed)


def frame_schema(layout: Layout) -> StructType:
    """The columns of a layout as Spark has them, behind the topic of each event."""
    return StructType([StructField(TOPIC, StringType()), *from_arrow_schema(layout.schema)])


def as_events(rows: pa.Table, topic: str) -> pa.Table:
    """Rows of a layout with their topic, as in `frame_schema`."""
    return rows.add_column(0, TOPIC, pa.repeat(topic, rows.num_rows))


def quoted(name: str) -> str:
    """A column's name as Spark's SQL takes any."""
    return "`{}`".format(name.replace("`", "``"))


def not_storable(returned: StructType, given: StructType) -> tuple[str, str] | None:
    """Why no sink can take rows with these columns, and what to do; None if it can. ``given`` are those of events."""
    types, known = ({field.name: field.dataType for field in one.fields} for one in (returned, given))
    lost = [name for name in PLACE if types.get(name) != known[name]]
    if lost:
        return f"it does not return {', '.join(lost)} as it got them", "keep event_id, partition and offset"
    names = [field.name for field in returned.fields]
    if len(types) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        return f"it returns two columns called {twice}", "drop or rename one"
    for name, type_ in types.items():
        if known.get(name) == type_:
            continue
        if name not in known and (problem := catalog.name_problem(name)) is not None:
            return f"it returns a column with a name that no column can have: {problem[0]}", problem[1]
        if not _is_storable(type_):
            remedy = "cast it, or make it a string with to_json"
            return f"it returns {name} as {type_.simpleString()}, which no table takes", remedy
    return None


def _session(spark: SparkSession, settings: Mapping[str, str]) -> SparkSession:
    session = spark.newSession()
    for name, value in settings.items():
        session.conf.set(name, value)
    return session


def _is_storable(type_: DataType) -> bool:
    try:
        return sql_type(to_arrow_type(type_)) is not None
    except PySparkTypeError:  # Arrow has no such type
        return False


def spark_reason(error: BaseException, spec: SinkSpec) -> str:
    """The error at the end of a Python worker's traceback, or the first line of Spark's own. If the sink's events have
    personal data, only its class.
    """
    reason = _reason(error)
    return kind_of(reason) if spec.is_personal else reason


def _reason(error: BaseException) -> str:
    text = _text(error)
    lines = [line for line in text.strip().splitlines() if line.strip()]
    if "Traceback" not in text:
        return lines[0] if lines else "no reason given"
    behind = text.rpartition("Traceback (most recent call last):")[2].splitlines()
    return next((line for line in behind[1:] if line and not line[0].isspace()), lines[0])


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except JVM_GONE:
        return "its JVM is gone"
