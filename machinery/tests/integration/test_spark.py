"""Spark as sinks use it: which checkpoints a query can continue, settings of the session, and who reaches it; and the
helper for transforms in a project's own tests: good ones pass, and each wrong one is named.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DecimalType, StringType, StructField, StructType

from outbox.base.settings import load
from outbox.events.schema import Column
from outbox.sink.decoding.layout import Layout
from outbox.sink.discovery import event_decoders
from outbox.sink.running.checkpoint import Checkpoint
from outbox.sink.spark.session import session
from outbox.sink.spark.transform import Function, Transform, as_events, frame_schema, not_storable
from outbox_lab.testing import check_transform, example_events
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.spark import leaves_sockets
from outbox_lab.testing.transform_rules import ONE_ROW, PLACES_KEPT, SAME_ROW, SEED
from tests import items, transforms
from tests.support.declared import Events, payload
from tests.support.declared_sinks import record, sink
from tests.support.made_events import as_read, nth_key

pytestmark = leaves_sockets

TOPIC = "events"
PLAN = 'v1\n{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}\n'
STRANGER = b"a stranger's object"


def answer_to_a_stranger(port: int) -> bytes:
    """Answer of Spark's RPC on a port to a Java object that is sent without a login.

    The formats: Spark's TransportFrameDecoder, RpcRequest (3) and RequestMessage, and Java's serialised String.
    """
    text = b"\xac\xed\x00\x05t" + struct.pack(">H", len(STRANGER)) + STRANGER
    name = b"MapOutputTracker"
    body = b"\0" + b"\1" + struct.pack(">H", 9) + b"127.0.0.1" + struct.pack(">i", port)
    body += struct.pack(">H", len(name)) + name + text
    message = b"\x03" + struct.pack(">qi", 1, len(body)) + body
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as one, suppress(ConnectionError):
        one.sendall(struct.pack(">q", 8 + len(message)) + message)
        while len(answer) < 8 or len(answer) < struct.unpack(">q", answer[:8])[0]:
            received = one.recv(1 << 16)
            if not received:
                break
            answer += received
    return answer


def test_driver_takes_no_object_of_a_stranger(spark: SparkSession) -> None:
    port = spark.sparkContext.getConf().get("spark.driver.port")
    assert port is not None
    answer = answer_to_a_stranger(int(port))
    assert b"SaslMessage" in answer  # it expects a login first
    assert STRANGER not in answer


@pytest.mark.parametrize("filters", ["", "# spark.ui.filters org.apache.spark.ui.JWSFilter\n"])
def test_a_ui_that_answers_everybody_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: str) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    file = tmp_path / "spark.properties"
    file.write_text(f"spark.ui.enabled true\n{filters}")
    with raises("ui-open", str(file)):
        session(load(tmp_path, environment=False, spark_properties=file))


class TestCheckpoint:
    """Which checkpoints a query can continue, and where its next batch begins as far as the files say."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A checkpoint that Spark has just made. It begins at offset 5."""
        for name in ("offsets", "commits", "sources/0"):
            (tmp_path / name).mkdir(parents=True)
        (tmp_path / "metadata").write_text('{"id":"f65c8f5c-5b0f-4c2e-9f43-2e0ad3f5b7a1"}')
        (tmp_path / "sources/0/0").write_text('\0v1\n{"events":{"0":5}}')
        return tmp_path

    @pytest.fixture
    def found(self, spark: SparkSession, folder: Path) -> Checkpoint:
        return Checkpoint(spark, folder.as_uri())

    @staticmethod
    def write(folder: Path, planned: int, committed: int) -> None:
        """Let a query have planned and committed so many batches of ten events each."""
        for batch in range(planned):
            (folder / f"offsets/{batch}").write_text(f'{PLAN}{{"events":{{"0":{(batch + 1) * 10}}}}}')
        for batch in range(committed):
            (folder / f"commits/{batch}").write_text('v1\n{"nextBatchWatermarkMs":0}')

    @staticmethod
    def problem(found: Checkpoint, positions: dict[int, int], *topics: str) -> str:
        """Why a sink at these positions of its topics cannot continue it."""
        return found.problem(found.start(), dict.fromkeys(topics or [TOPIC], positions)) or ""

    def test_a_folder_without_files_is_new(self, spark: SparkSession, tmp_path: Path) -> None:
        found = Checkpoint(spark, (tmp_path / "missing").as_uri())
        assert (found.is_new(), found.start(), self.problem(found, {0: 0})) == (True, None, "")

    @pytest.mark.parametrize(("planned", "committed", "start"), [(0, 0, 5), (1, 0, 5), (1, 1, 10), (2, 1, 10)], ids=str)
    def test_it_is_continued_behind_the_last_committed_batch(
        self, found: Checkpoint, folder: Path, planned: int, committed: int, start: int
    ) -> None:
        """Also if the sink has applied what Spark has planned and not committed, or more."""
        self.write(folder, planned, committed)
        assert (found.is_new(), found.start(), found.is_pending()) == (False, {TOPIC: {0: start}}, planned > committed)
        assert [found.end(batch)[TOPIC][0] for batch in range(planned)] == [10, 20][:planned]
        for positions in ({0: start}, {0: start + 10}, {0: 99, 1: 3}):
            assert self.problem(found, positions) == ""

    @pytest.mark.parametrize(
        ("positions", "topics", "problem"),
        [
            *((positions, [TOPIC], "ahead") for positions in ({0: 9}, {}, {1: 99})),
            *(({0: 99}, topics, "other topics: events") for topics in (["other"], [TOPIC, "other"])),
        ],
    )
    def test_one_that_is_ahead_of_the_positions_or_of_other_topics_is_not(
        self, found: Checkpoint, folder: Path, positions: dict[int, int], topics: list[str], problem: str
    ) -> None:
        self.write(folder, 1, 1)
        assert problem in self.problem(found, positions, *topics)

    @pytest.mark.parametrize("content", ["", "\0v1\n", '\0v1\n{"events":{"0":', "\0" * 20])
    def test_the_beginning_is_needed_until_the_first_commit(
        self, found: Checkpoint, folder: Path, content: str
    ) -> None:
        self.write(folder, 1, 0)
        (folder / "sources/0/0").write_text(content)
        assert self.problem(found, {0: 99}) == "truncated or missing: sources/0/0"
        assert found.start() is None
        self.write(folder, 2, 1)
        assert (found.start(), self.problem(found, {0: 99})) == ({TOPIC: {0: 10}}, "")

    @pytest.mark.parametrize(
        ("file", "kept", "start"),
        [
            *((file, -1, 20) for file in ("metadata", "commits/1", "offsets/2")),
            ("offsets/1", -1, 10),
            ("offsets/1", len("v1"), 10),
        ],
    )
    def test_one_with_a_truncated_file_is_not_continued(
        self, found: Checkpoint, folder: Path, file: str, kept: int, start: int
    ) -> None:
        self.write(folder, 3, 2)
        (folder / file).write_text((folder / file).read_text()[:kept])
        assert self.problem(found, {0: 20}) == f"truncated or missing: {file}"
        assert found.start() == {TOPIC: {0: start}}, "the newest that is known"
        if file != "offsets/2":  # without it, the batch is planned again
            (folder / file).unlink()
            assert self.problem(found, {0: 20}) == f"truncated or missing: {file}"

    def test_one_that_has_lost_its_plans_is_not_continued(self, found: Checkpoint, folder: Path) -> None:
        self.write(folder, 3, 4)
        assert self.problem(found, {0: 99}) == "truncated or missing: offsets/3"


# Transforms ----------------------------------------------------------------------------------------------------------

SETTINGS = load(environment=False)
UNITS = ["KGM", "GRM", "LTR"]
# By the transform: the rule, and the column by which it is broken, if it is one.
WRONG: dict[Function, tuple[str, str]] = {
    transforms.numbered: (SAME_ROW, "column number: "),
    transforms.aggregated: (SAME_ROW, "no row among all, a row "),
    transforms.timed: (SAME_ROW, "column at: "),
    transforms.random: (SAME_ROW, "column number: 0."),
    transforms.limited: (SAME_ROW, "no row among all, a row "),
    transforms.doubled: (ONE_ROW, "it has two equal rows"),
    transforms.exploded: (ONE_ROW, "column part: 'one' and 'two'"),
    transforms.invented: (PLACES_KEPT, "no event is there"),
    transforms.moved: (PLACES_KEPT, "no event is there"),
}


@pytest.fixture(scope="module")
def moved(spark: SparkSession) -> DataFrame:
    """Events of items of three units, none of them of a quantity that makes a transform fail."""
    payloads = [payload_of(number) for number in range(60)]
    return example_events(spark, SETTINGS, ["item"], {"item.received": payloads[:30], "item.picked": payloads[30:]})


def payload_of(number: int) -> dict[str, object]:
    key, quantity = nth_key(number % 4), (100 + number) * (1 if number < 30 else -1)
    return items.payload(nth_key(1000 + number), key, quantity, 1 + number, unit=UNITS[number % 3], total_after=5)


@pytest.mark.parametrize("good", ["weighed", "shuffled", "read_twice", "in_python", "failing", "unreadable"])
def test_a_transform_that_keeps_the_rules_passes(moved: DataFrame, good: str) -> None:
    rows = check_transform(getattr(transforms, good), moved)
    assert len(rows) == (40 if good in ("weighed", "shuffled") else 60)
    assert [row["event_id"] for row in rows] == sorted(row["event_id"] for row in rows)


def test_the_rows_are_returned_as_the_sink_would_have_them(moved: DataFrame) -> None:
    first = check_transform(transforms.weighed, moved)[0]
    assert (first["quantity"], first["weight"], first["share"]) == (100, Decimal(100_000), 25.0)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: one.__name__)
def test_one_that_breaks_a_rule_is_named_with_event_and_column(moved: DataFrame, wrong: Function) -> None:
    rule, column = WRONG[wrong]
    with pytest.raises(AssertionError) as caught:
        check_transform(wrong, moved)
    message = str(caught.value)
    assert message.startswith(f"{wrong.__name__} breaks the rule: {rule}. Event ")
    assert column in message
    assert f"seed {SEED})" in message


@pytest.mark.parametrize("wrong", ["without_id", "with_an_array", "ambiguous"])
def test_one_that_no_sink_can_take_is_named(moved: DataFrame, wrong: str) -> None:
    with pytest.raises(AssertionError, match=f"no sink can take {wrong}: "):
        check_transform(getattr(transforms, wrong), moved)


def test_a_test_without_events_shows_nothing(moved: DataFrame) -> None:
    with pytest.raises(AssertionError, match="no events"):
        check_transform(transforms.weighed, moved.limit(0))


def test_an_error_of_the_transform_is_raised_as_it_is(moved: DataFrame) -> None:
    with pytest.raises(Exception, match="DIVIDE_BY_ZERO"):
        check_transform(transforms.always_failing, moved)


@pytest.mark.parametrize("names", [["item"], ["order"], ["item", "order"], ["order.placed.v1"]])
def test_examples_have_the_columns_that_a_sink_gives(spark: SparkSession, names: list[str]) -> None:
    found = example_events(spark, SETTINGS, names, count=20)
    assert found.schema == frame_schema(Layout.of_decoders(event_decoders(SETTINGS, names)))
    rows = found.collect()
    assert rows == example_events(spark, SETTINGS, names, count=20).collect(), "they are the same each time"
    assert len({(row.event_id, row.partition, row.offset) for row in rows}) == len(rows) == 20
    assert names != ["order"] or {row.unit for row in rows} >= {"PCE"}, "older versions are upcast"


def test_payloads_that_a_sink_would_not_take_are_refused(spark: SparkSession) -> None:
    with raises("event-invalid", "quantity"):
        example_events(spark, SETTINGS, ["item"], {"item.received": [payload_of(1) | {"quantity": "many"}]})
    with raises("event-invalid", "item.picked"):
        example_events(spark, SETTINGS, ["item.received"], {"item.picked": [payload_of(31)]})
    with raises("event-invalid", "aggregate type"):
        example_events(spark, SETTINGS, ["item"], {"item": [payload_of(1)]})
    with raises("event-undeclared", "item.nothing"):
        example_events(spark, SETTINGS, ["item"], {"item.nothing": [payload_of(1)]})


def test_a_property_may_have_the_name_of_the_topic(spark: SparkSession, tmp_path: Path) -> None:
    values = {"topic": "mine", "o'clock `s`": "noon"}
    schema = payload({name: {"type": "string"} for name in values})
    spec = sink(Events(tmp_path).aggregate("order", placed_v1=schema).load(), "order", projections=tmp_path)
    spec = replace(spec, job=replace(spec.job, transform="tests.transforms:everything"))
    [(topic, decoder)] = spec.decoders.items()
    decoded = decoder.decode(as_read(record("placed", {"id": "a", "number": 1, **values})))
    events = as_events(spec.layout.table(decoded.rows), topic)
    returned = Transform(spark, spec).apply(events).rows
    assert returned is not None
    assert returned.select([*values]).to_pylist() == [values]
    assert events["outbox_topic"].to_pylist() == [topic]
    assert "outbox_topic" not in returned.column_names


@pytest.mark.parametrize("name", ["ctid", "outbox_version", "a%", "a:b", 'a"b', "a" * 52])
def test_a_name_that_no_column_of_postgres_can_have_is_refused(name: str) -> None:
    given = frame_schema(Layout({"order.placed": [Column("price:numeric", "numeric", is_nullable=True)]}))
    assert not_storable(StructType([*given, StructField(name, StringType())]), given) is not None
    cast = [StructField("price:numeric", DecimalType(38, 2)) if one.name == "price:numeric" else one for one in given]
    assert not_storable(StructType(cast), given) is None
