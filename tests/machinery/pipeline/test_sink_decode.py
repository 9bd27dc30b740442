"""What the sinks let pass in Spark, on the corpus whose faults `tests/machinery/unit/test_sink_verdict.py` has told."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from outbox.base.errors import Failure
from outbox.sink.decode import decode
from outbox.writing.contract import Contract
from sinks.events import events
from tests.fixtures.spark import RECORD, RECORDED_AT, leaves_sockets
from tests.support.events import SHAPE
from tests.support.record_corpus import HEADERS, HEADERS_OF, ID, KEY, VALUES, changed

pytestmark = leaves_sockets
Cells = tuple[bytes | None, bytes | None, str, int, int, datetime, list[tuple[str, bytes | None]] | None]


def record(
    value: bytes | None = changed(), headers: dict[str, Any] = HEADERS, key: bytes | None = KEY.encode()
) -> Cells:
    pairs = [(name, None if text is None else text.encode()) for name, text in headers.items()]
    return (key, value, "t", 0, 7, RECORDED_AT, pairs)


def passed(spark: SparkSession, records: list[Cells]) -> list[bool]:
    """Whether each of the records is let pass."""
    return [row["record"] is None for row in events(spark.createDataFrame(records, RECORD)).collect()]


def test_values_pass_if_nothing_is_wrong_with_them(spark: SparkSession) -> None:
    found = dict(zip(VALUES, passed(spark, [record(value) for value, _ in VALUES.values()]), strict=True))
    assert found == {name: reason is None for name, (_, reason) in VALUES.items()}


def test_headers_pass_if_nothing_is_wrong_with_them(spark: SparkSession) -> None:
    records = [record(headers=headers) for headers, _ in HEADERS_OF.values()]
    found = dict(zip(HEADERS_OF, passed(spark, records), strict=True))
    assert found == {name: reason is None for name, (_, reason) in HEADERS_OF.items()}


def test_the_key_must_be_the_item(spark: SparkSession) -> None:
    keys = [KEY.encode(), b"other", None, b"\xff"]
    assert passed(spark, [record(key=key) for key in keys]) == [True, False, False, False]


def test_odd_headers_are_no_crash(spark: SparkSession) -> None:
    plain = record()
    no_headers: Cells = (*plain[:6], None)
    twice: Cells = (*plain[:6], [("id", b"an older one"), *(plain[6] or [])])
    assert passed(spark, [no_headers, twice]) == [False, True]


def test_valid_events_carry_columns_and_others_their_bytes(spark: SparkSession) -> None:
    good, bad = events(spark.createDataFrame([record(), record(b"\xff")], RECORD)).collect()
    assert (good["event_id"], good["quantity"], good["unit"], good["offset"]) == (ID, -5, "KGM", 7)
    assert good["occurred_at"].microsecond == 123456
    assert bytes(bad["record"]["value"]) == b"\xff"
    assert {header["key"]: bytes(header["value"]).decode() for header in bad["record"]["headers"]} == HEADERS


def test_a_sampled_trace_is_told_and_no_trace_makes_an_event_invalid(spark: SparkSession) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"
    texts = [f"{trace}01", f"{trace}03", f"{trace}00", f"{trace}02", "nonsense 1", "", None]
    records = [record(headers=HEADERS | {"traceparent": text}) for text in texts]
    bad = record(b"{", HEADERS | {"traceparent": f"{trace}01"})
    found = events(spark.createDataFrame([record(), *records, bad], RECORD)).collect()
    assert [row["traceparent"] for row in found] == [None, *texts[:2], *[None] * 5, f"{trace}01"]
    assert [row["record"] is None for row in found] == [*[True] * 8, False]


class TestOtherSchemas:
    """What adopters may write in theirs."""

    @staticmethod
    def passed(spark: SparkSession, rule: dict[str, Any], required: bool, values: list[str]) -> list[bool]:
        """Whether each JSON text passes as the property ``extra`` of such a rule; an empty one is left out."""
        schema = json.loads(json.dumps(Contract(SHAPE.schema_file).schema))
        schema["properties"]["extra"] = rule
        schema["required"] += ["extra"] if required else []
        written = [changed()[:-1] + (f', "extra": {value}}}' if value else "}").encode() for value in values]
        frame = spark.createDataFrame([record(value) for value in written], RECORD)
        return [row["record"] is None for row in decode(frame, schema, key="item_id").collect()]

    def test_a_text_is_no_number(self, spark: SparkSession) -> None:
        values = ['"a"', '"1"', "1", "true", "null", "[]", "{}", ""]
        assert self.passed(spark, {"type": "string"}, True, values) == [True, True, *[False] * 6]

    def test_a_text_that_postgres_has_no_text_for_is_left_out(self, spark: SparkSession) -> None:
        values = [r'"a\\u0000"', r'"a\u0000"', r'"a\ud83d\ude00"']
        assert self.passed(spark, {"type": "string"}, True, values) == [True, False, True]

    def test_what_is_optional_may_be_missing_and_not_wrong(self, spark: SparkSession) -> None:
        values = ["", "5", "5.0", '"5"', "null", "-1"]
        rule = {"type": "integer", "minimum": 0}
        assert self.passed(spark, rule, False, values) == [True, True, True, False, False, False]

    def test_texts_are_bounded_and_listed(self, spark: SparkSession) -> None:
        assert self.passed(spark, {"type": "string", "minLength": 2}, True, ['"é"', '"éé"']) == [False, True]
        assert self.passed(spark, {"type": "string", "enum": ["a", "b"]}, True, ['"a"', '"c"']) == [True, False]
        assert self.passed(spark, {"type": "boolean", "const": True}, True, ["true", "false", "1"]) == [
            True,
            False,
            False,
        ]

    @pytest.mark.parametrize("rule", [{"type": "integer", "multipleOf": 5}, {"type": "number"}, {"type": ["integer"]}])
    def test_what_cannot_be_checked_is_refused(self, spark: SparkSession, rule: dict[str, Any]) -> None:
        with pytest.raises(Failure, match="extra"):
            self.passed(spark, rule, True, ["5"])


def test_the_session_leaves_nothing_in_the_working_folder(spark: SparkSession) -> None:
    assert not [*Path.cwd().glob("artifacts"), *Path.cwd().glob("spark-warehouse")]
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
