"""What the sinks take for a valid event, in Spark, against the JSON Schema and its own library."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from outbox.errors import Failure
from outbox.event import Contract
from outbox.settings import load
from outbox.sink import spark as spark_session
from outbox.sink.decode import decode
from sinks.events import events
from tests.sink import NOW_MS, uuid7

# PySpark leaves the socket that it fetches results over to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"
)

RECORDS = (
    "key binary, value binary, topic string, partition int, offset bigint, "
    "headers array<struct<key string, value binary>>"
)
ID = uuid7(Random(1))  # noqa: S311
ACCOUNT = str(uuid.UUID(int=1))
GOOD: dict[str, Any] = {
    "transfer_id": str(uuid.UUID(int=2)),
    "account_id": ACCOUNT,
    "amount": -5,
    "currency": "EUR",
    "balance_after": 10,
    "version": 1,
    "occurred_at": "2026-11-21T05:00:00.123456Z",
}
HEADERS = {"id": ID, "eventType": "transfer.debited", "schemaVersion": "1"}
DAY_MS = 24 * 60 * 60 * 1000


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = spark_session.session(load(tmp_path_factory.mktemp("spark")))
    yield session
    session.stop()


def changed(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode()


def without(name: str) -> bytes:
    return json.dumps({key: value for key, value in GOOD.items() if key != name}).encode()


def raw(name: str, text: str) -> bytes:
    """A value with one property written in a way that Python's json would not."""
    return json.dumps(GOOD | {name: "@"}).replace('"@"', text).encode()


VALUES: dict[str, tuple[bytes | None, str | None]] = {
    "good": (changed(), None),
    "new property": (changed(note="ünknown", nested={"amount": "no"}), None),
    "space around": (b" \n" + changed() + b" ", None),
    "big": (changed(note="x" * 1_000_000), None),
    "biggest amount": (changed(amount=2**63 - 1), None),
    "smallest amount": (changed(amount=-(2**63)), None),
    "integer with a point": (raw("amount", "7.0"), None),
    "tombstone": (None, "no value"),
    "empty": (b"", "not JSON"),
    "words": (b"hello", "not JSON"),
    "cut off": (changed()[:-1], "not JSON"),
    "more behind it": (changed() + b"x", "not JSON"),
    "two of them": (changed() + changed(), "not JSON"),
    "two in a list": (changed() + b"," + changed(), "not JSON"),
    "closing what it did not open": (changed() + b"] [" + changed(), "not JSON"),
    "not UTF-8": (changed().replace(b"EUR", b"E\xffR"), "not UTF-8"),
    "NUL": (changed(note="a\0"), "schema violation"),
    "a list": (b"[1]", "schema violation"),
    "a number": (b"1", "schema violation"),
    "null": (b"null", "schema violation"),
    "deep": (b"[" * 5000 + b"]" * 5000, "not JSON"),
    "amount as text": (changed(amount="5"), "schema violation"),
    "amount with a fraction": (changed(amount=5.5), "schema violation"),
    "amount true": (changed(amount=True), "schema violation"),
    "amount null": (changed(amount=None), "schema violation"),
    "amount zero": (changed(amount=0), "schema violation"),
    "amount beyond bigint": (changed(amount=2**63), "schema violation"),
    "amount far beyond bigint": (changed(amount=10**60), "schema violation"),
    "version zero": (changed(version=0), "schema violation"),
    "currency as number": (changed(currency=978), "schema violation"),
    "currency too long": (changed(currency="EURO"), "schema violation"),
    "currency with a line end": (changed(currency="EUR\n"), "schema violation"),
    "currency an object": (changed(currency={"code": "EUR"}), "schema violation"),
    "account not a uuid": (changed(account_id="1"), "schema violation"),
    "time without zone": (changed(occurred_at="2026-11-21T05:00:00"), "schema violation"),
    **{f"no {name}": (without(name), "schema violation") for name in GOOD},
}
# Where the sink is stricter than the schema's library: Postgres has no U+0000, and Kafka no key but the account's.
STRICTER = {"NUL"}


def record(value: bytes | None, headers: dict[str, Any] | None = None, key: bytes | None = ACCOUNT.encode()) -> Any:
    pairs = [(name, None if text is None else text.encode()) for name, text in (headers or HEADERS).items()]
    return (key, value, "t", 0, 7, pairs)


def reasons(spark: SparkSession, records: list[Any]) -> list[str | None]:
    frame = events(spark.createDataFrame(records, RECORDS))
    return [row["reason"] for row in frame.select("reason").collect()]


def test_values_are_judged_as_the_schema_says(spark: SparkSession) -> None:
    found = dict(zip(VALUES, reasons(spark, [record(value) for value, _ in VALUES.values()]), strict=True))
    assert found == {name: reason for name, (_, reason) in VALUES.items()}


@pytest.mark.parametrize("name", [name for name in VALUES if name not in STRICTER])
def test_the_schemas_own_library_agrees(name: str) -> None:
    value, reason = VALUES[name]
    verdict = "invalid"
    with suppress(Failure, ValueError, TypeError, RecursionError):
        Contract().check_value(json.loads(value.decode() if value is not None else ""))
        verdict = "valid"
    assert (verdict == "valid") == (reason is None)


HEADER_CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "good": (HEADERS, None),
    "trace": (HEADERS | {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}, None),
    "null trace": (HEADERS | {"traceparent": None}, None),
    "unknown header": (HEADERS | {"x": "y"}, None),
    "no id": ({"eventType": "transfer.debited", "schemaVersion": "1"}, "missing id"),
    "null id": (HEADERS | {"id": None}, "missing id"),
    "empty id": (HEADERS | {"id": ""}, "malformed id"),
    "words as id": (HEADERS | {"id": "hello"}, "malformed id"),
    "id with a line end": (HEADERS | {"id": ID + "\n"}, "malformed id"),
    "random id": (HEADERS | {"id": str(uuid.UUID(int=5, version=4))}, "malformed id"),
    "id from tomorrow, almost": (HEADERS | {"id": uuid7(Random(2), NOW_MS + DAY_MS - 600_000)}, None),  # noqa: S311
    "id from the future": (HEADERS | {"id": uuid7(Random(2), NOW_MS + 2 * DAY_MS)}, "id from the future"),  # noqa: S311
    "unknown type": (HEADERS | {"eventType": "transfer.undone"}, "unknown event type"),
    "no type": ({"id": ID, "schemaVersion": "1"}, "unknown event type"),
    "newer version": (HEADERS | {"schemaVersion": "2"}, "unknown schema version"),
    "no version": ({"id": ID, "eventType": "transfer.debited"}, "unknown schema version"),
}


def test_headers_are_judged(spark: SparkSession) -> None:
    records = [record(changed(), headers) for headers, _ in HEADER_CASES.values()]
    found = dict(zip(HEADER_CASES, reasons(spark, records), strict=True))
    assert found == {name: reason for name, (_, reason) in HEADER_CASES.items()}


def test_the_key_is_the_account(spark: SparkSession) -> None:
    keys = [ACCOUNT.encode(), b"other", None, b"\xff"]
    found = reasons(spark, [record(changed(), key=key) for key in keys])
    assert found == [None, "key mismatch", "key mismatch", "key mismatch"]


def test_no_headers_at_all_is_no_crash(spark: SparkSession) -> None:
    without_headers = (ACCOUNT.encode(), changed(), "t", 0, 7, None)
    assert reasons(spark, [without_headers]) == ["missing id"]


def test_good_events_carry_columns_and_bad_ones_their_bytes(spark: SparkSession) -> None:
    good, bad = events(spark.createDataFrame([record(changed()), record(b"\xff")], RECORDS)).collect()
    assert (good["event_id"], good["amount"], good["offset"], good["record"]) == (ID, -5, 7, None)
    assert good["occurred_at"].microsecond == 123456
    assert bytes(bad["record"]["value"]) == b"\xff"
    assert [(header["key"], bytes(header["value"]).decode()) for header in bad["record"]["headers"]] == list(
        HEADERS.items()
    )


def test_a_constraint_that_cannot_be_checked_is_refused(spark: SparkSession) -> None:
    schema = json.loads(json.dumps(Contract().schema))
    schema["properties"]["amount"]["multipleOf"] = 5
    frame = spark.createDataFrame([record(changed())], RECORDS)
    with pytest.raises(Failure, match="amount by `multipleOf: 5`"):
        decode(frame, schema, key="account_id")


def test_the_session_leaves_nothing_outside_its_folder(spark: SparkSession) -> None:
    assert not list(Path.cwd().glob("artifacts")) + list(Path.cwd().glob("spark-warehouse"))
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
