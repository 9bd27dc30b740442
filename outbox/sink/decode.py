"""Decode records by the JSON Schema of their event, as DataFrame code: no Python runs beside the executors.

What is surely valid becomes a row of columns. Anything else keeps its bytes, for `outbox.sink.verdict` to say what is
wrong: to tell that here too would make every plan several times as big, and the first batch seconds slower.
"""

from __future__ import annotations

import functools
import operator
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from outbox.base import trace
from outbox.base.errors import Failure
from outbox.sink.verdict import FUTURE_LIMIT_MS

Schema = Mapping[str, Any]

UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
# Java looks a list of characters up in a table, and asks ranges one after the other: it adds up.
HEX = "[0123456789abcdef]"
FAST_UUID = UUID.replace("[0-9a-f]", HEX)
FAST_UUID_V7 = f"^{HEX}{{8}}-{HEX}{{4}}-7{HEX}{{3}}-[89ab]{HEX}{{3}}-{HEX}{{12}}$"
UUID_LENGTH = 36  # beside each pattern, as `$` lets a line end pass
# By JSON type: the type of the column, and what Spark calls such a variant. An integer may be written 5.0, not 5e0.
TYPES = {
    "string": ("string", "^STRING$"),
    "integer": ("bigint", r"^(BIGINT|DECIMAL\(\d+,0\))$"),
    "boolean": ("boolean", "^BOOLEAN$"),
}
KEPT = ("key", "headers", "value", "timestamp")  # of a record that is not valid, for its dead letter
ANNOTATIONS = {"type", "description", "title", "examples", "default", "$comment"}


def decode(records: DataFrame, schema: Schema, key: str) -> DataFrame:
    """Decode records of Kafka's source (with headers) whose value is JSON as ``schema`` says, and whose key is the
    property ``key``.

    Returns ``event_id``, ``partition``, ``offset``, a column a property of the schema, ``traceparent``, which is null
    but for sampled ones, and ``record`` (struct of key, headers, value, timestamp), which is null for valid records; of
    the others only that, the trace and the place are to be used. What is not selected of it costs nothing.
    Raises Failure if the schema uses a keyword that is not understood here: no constraint is skipped silently.
    """
    required = schema.get("required", ())
    properties = [_Property(name, rule, name in required) for name, rule in schema["properties"].items()]
    headers = schema["$defs"]["headers"]
    fields = ", ".join(f"`{field.name}`: {field.parsed_type}" for field in properties)
    event, is_whole = parsed("value", f"struct<{fields}>")
    entries = F.map_from_entries("headers")  # of two of a name the last one: `spark.session` sets it so
    # Two steps and no more, as each copies its rows: the first takes out once what the second looks at many times.
    taken = records.select(
        *KEPT,
        "partition",
        "offset",
        *(F.try_element_at(entries, F.lit(name)).cast("string").alias(f"_header_{name}") for name in _names(headers)),
        *(column for field in properties for column in field.take(event[field.name])),
        is_whole.alias("_is_whole"),
        _latest_id().alias("_latest_id"),
    )
    valid = all_of(
        F.col("_is_whole"),
        F.is_valid_utf8(F.col("value").cast("string")),
        *_valid_headers(headers),
        *(condition for field in properties for condition in field.valid()),
        F.col("key").cast("string") == F.col(f"_raw_{key}"),
    )
    return taken.select(
        _header("id").alias("event_id"),
        "partition",
        "offset",
        *(field.column().alias(field.name) for field in properties),
        F.when(_is_sampled(), _header("traceparent")).alias("traceparent"),
        kept_unless(valid),
    )


def kept_unless(valid: Column) -> Column:
    """The column ``record``: what is kept of a record, null if it is valid."""
    return F.when(~F.coalesce(valid, F.lit(False)), F.struct(*KEPT)).alias("record")


def parsed(column: str, type_: str) -> tuple[Column, Column]:
    """Bytes of JSON read as a struct type, and whether all of them are that: the parser itself stops where it likes.

    They are parsed with a mark behind them that they cannot know: what the parser did not come by, is not JSON.
    """
    mark = secrets.token_hex(8)
    found = F.from_json(
        F.concat(F.lit("["), F.col(column).cast("string"), F.lit(f', {{"_mark": "{mark}"}}]')),
        f"array<{type_.removesuffix('>')}, _mark: string>>",
        {"allowSingleQuotes": "false"},
    )
    return F.get(found, F.lit(0)), F.get(found, F.lit(1))["_mark"] == mark


class _Property:
    """One property of the event: how it is read strictly.

    Spark's parser takes any token for a text, and cannot tell a property that is missing from one that is wrong. Where
    that would show, the property is read as a variant, which knows its type. That costs, so not where it cannot
    show: a required integer or boolean, and a required text of a format that no other token has.
    """

    def __init__(self, name: str, rule: Schema, required: bool) -> None:
        if str(rule.get("type")) not in TYPES:
            raise Failure(f"the event schema declares {name} as {rule.get('type')}", f"known are {', '.join(TYPES)}")
        self.name = name
        self._rule = rule
        self._required = required
        self._type, self._variant_type = TYPES[rule["type"]]
        self._is_variant = not required or (rule["type"] == "string" and "format" not in rule)

    @property
    def parsed_type(self) -> str:
        return "variant" if self._is_variant else self._type

    def take(self, parsed: Column) -> Iterator[Column]:
        """What is taken out of the parsed value for the other methods to look at."""
        raw = F.try_variant_get(parsed, "$", self._type) if self._is_variant else parsed
        yield raw.alias(f"_raw_{self.name}")
        if self._rule.get("format") == "date-time":
            yield F.try_to_timestamp(raw).alias(f"_moment_{self.name}")
        if self._is_variant:
            yield F.schema_of_variant(parsed).alias(f"_type_{self.name}")  # null if it is missing

    def column(self) -> Column:
        """The value; null if it is missing, and maybe if it is wrong."""
        return F.col(f"_moment_{self.name}" if self._rule.get("format") == "date-time" else f"_raw_{self.name}")

    def valid(self) -> Iterator[Column]:
        """Conditions that are all true of a valid property."""
        conditions = [self.column().isNotNull(), *_constraints(self.name, F.col(f"_raw_{self.name}"), self._rule)]
        if self._is_variant:
            conditions.append(F.col(f"_type_{self.name}").rlike(self._variant_type))
        if self._rule["type"] == "string" and "format" not in self._rule:
            conditions.append(~F.contains(F.col(f"_raw_{self.name}"), F.lit("\0")))  # Postgres has no such text
        if self._required:
            yield from conditions
        else:
            yield F.col(f"_type_{self.name}").isNull() | all_of(*conditions)


def _names(headers: Schema) -> list[str]:
    return list(dict.fromkeys(["id", "traceparent", *headers["properties"]]))


def _header(name: str) -> Column:
    return F.col(f"_header_{name}")


def _is_sampled() -> Column:
    """Whether a traceparent looks as if it were sampled: few are, so it is not here that they are read with care."""
    traceparent = _header("traceparent")
    return (F.octet_length(traceparent) == trace.LENGTH) & F.substring(traceparent, -1, 1).isin(*trace.SAMPLED_ENDINGS)


def _latest_id() -> Column:
    """The lowest UUIDv7 that is too far ahead of its record: its first 12 digits are the time in milliseconds.

    Not ahead of the clock: a record read again gets the same verdict; and the time of the batch would be a constant in
    the generated code, which then would be compiled anew for each batch.
    """
    digits = F.lower(F.lpad(F.hex(F.unix_millis("timestamp") + FUTURE_LIMIT_MS), 12, "0"))
    return F.concat(F.substring(digits, 1, 8), F.lit("-"), F.substring(digits, 9, 4), F.lit("-8"))


def _valid_headers(headers: Schema) -> Iterator[Column]:
    event_id = _header("id")
    yield event_id.rlike(FAST_UUID_V7) & (F.octet_length(event_id) == UUID_LENGTH)
    yield event_id < F.col("_latest_id")  # of two ids the later one is the greater text
    for name, rule in headers["properties"].items():
        value = _header(name)
        conditions = [*_constraints(f"header {name}", value, rule)]
        if name in headers.get("required", ()):
            yield all_of(value.isNotNull(), *conditions)
        elif conditions:
            yield value.isNull() | all_of(*conditions)


def _constraints(name: str, value: Column, rule: Schema) -> Iterator[Column]:  # noqa: PLR0912 - a table of keywords
    """What the schema wants of a value beside its type. Raises Failure for what cannot be expressed."""
    if rule.get("format") == "uuid" and rule.get("pattern") == UUID:
        rule = {keyword: wanted for keyword, wanted in rule.items() if keyword != "pattern"}  # the format says it
    for keyword, wanted in rule.items():
        match keyword, wanted:
            case "pattern", str():
                yield value.rlike(wanted)
            case "minLength", int():
                yield F.length(value) >= wanted
            case "maxLength", int():
                yield (F.octet_length(value) <= wanted) | (F.length(value) <= wanted)  # the first is known, not counted
            case "minimum", int():
                yield value >= F.lit(wanted)
            case "maximum", int():
                yield value <= F.lit(wanted)
            case "enum", list():
                yield value.isin(wanted)
            case "const", str() | int():
                yield value == F.lit(wanted)
            case "not", {"const": unwanted, **others} if not others:
                yield value != F.lit(unwanted)
            case "format", "uuid":
                yield value.rlike(FAST_UUID) & (F.octet_length(value) == UUID_LENGTH)
            case "format", "date-time":
                pass  # it is read as a timestamp
            case _ if keyword not in ANNOTATIONS:
                raise Failure(
                    f"the event schema constrains {name} by `{keyword}: {wanted}`, which the sink cannot check",
                    "express it by type, pattern, length, minimum, maximum, enum, const or `not: {const: …}`",
                )


def all_of(*conditions: Column) -> Column:
    """All of these conditions."""
    return functools.reduce(operator.and_, conditions)
