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

from outbox.errors import Failure
from outbox.sink.verdict import FUTURE_LIMIT_MS

Schema = Mapping[str, Any]

UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
UUID_V7 = "^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$"
UUID_LENGTH = 36  # beside each pattern, as `$` lets a line end pass
# By JSON type: the type of the column, and what Spark calls such a variant. An integer may be written 5.0, not 5e0.
TYPES = {
    "string": ("string", "^STRING$"),
    "integer": ("bigint", r"^(BIGINT|DECIMAL\(\d+,0\))$"),
    "boolean": ("boolean", "^BOOLEAN$"),
}
ANNOTATIONS = {"type", "description", "title", "examples", "default", "$comment"}


def decode(records: DataFrame, schema: Schema, key: str) -> DataFrame:
    """Decode records of Kafka's source (with headers) whose value is JSON as ``schema`` says, and whose key is the
    property ``key``.

    Returns ``event_id``, ``partition``, ``offset``, a column a property of the schema, and ``record`` (struct of key,
    headers, value), which is null for valid records; of the others only ``record`` and the place are to be used.
    Raises Failure if the schema uses a keyword that is not understood here: no constraint is skipped silently.
    """
    required = schema.get("required", ())
    properties = [_Property(name, rule, name in required) for name, rule in schema["properties"].items()]
    headers: Schema = schema["$defs"]["headers"]
    # The value is parsed with a mark behind it that it cannot know: what the parser did not come by, is not JSON.
    mark = secrets.token_hex(8)
    fields = ", ".join(f"`{field.name}`: {field.parsed_type}" for field in properties)
    parsed = F.from_json(
        F.concat(F.lit("["), "_text", F.lit(f', {{"_mark": "{mark}"}}]')),
        f"array<struct<{fields}, _mark: string>>",
        {"allowSingleQuotes": "false"},
    )
    read = (
        records.select("*", F.col("value").cast("string").alias("_text"), *_headers(headers))
        .select("*", parsed.alias("_parsed"))
        .select(
            "*",
            F.get("_parsed", F.lit(0)).alias("_event"),
            F.get("_parsed", F.lit(1))["_mark"].alias("_end"),
        )
        .select("*", *(field.column().alias(field.name) for field in properties))
    )
    valid = _all(
        F.col("_end") == mark,
        F.is_valid_utf8("_text"),
        ~F.contains(F.col("_text"), F.lit("\\u0000")),  # Postgres has no such text
        *_valid_headers(headers),
        *(condition for field in properties for condition in field.valid()),
        F.col("key").cast("string") == F.col(key),
    )
    return read.select(
        F.col("header_id").alias("event_id"),
        "partition",
        "offset",
        *(field.result().alias(field.name) for field in properties),
        F.when(~F.coalesce(valid, F.lit(False)), F.struct("key", "headers", "value")).alias("record"),
    )


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

    def column(self) -> Column:
        raw = F.col("_event")[self.name]
        return F.try_variant_get(raw, "$", self._type) if self._is_variant else raw

    def result(self) -> Column:
        return F.try_to_timestamp(F.col(self.name)) if self._is_moment else F.col(self.name)

    def valid(self) -> Iterator[Column]:
        """Conditions that are all true of a valid property."""
        value = F.col(self.name)
        conditions = [value.isNotNull(), *_constraints(self.name, value, self._rule)]
        if self._is_moment:
            conditions.append(self.result().isNotNull())
        if self._is_variant:
            conditions.append(F.schema_of_variant(F.col("_event")[self.name]).rlike(self._variant_type))
        if self._required:
            yield from conditions
        else:
            yield F.col("_event")[self.name].isNull() | _all(*conditions)

    @property
    def _is_moment(self) -> bool:
        return self._rule.get("format") == "date-time"


def _headers(headers: Schema) -> Iterator[Column]:
    for name in _checked(headers):
        yield _last_header(name).cast("string").alias(f"header_{name}")


def _checked(headers: Schema) -> dict[str, Schema]:
    """The headers of which the schema wants anything; looking the others up would cost for nothing."""
    required = headers.get("required", ())
    return {name: rule for name, rule in headers["properties"].items() if name in required or rule.keys() - ANNOTATIONS}


def _last_header(name: str) -> Column:
    """The last header of a name, as Kafka's own ``lastHeader`` has it; null if there is none."""
    named = F.filter("headers", lambda header: header["key"] == name)
    return F.try_element_at(named, F.lit(-1))["value"]


def _valid_headers(headers: Schema) -> Iterator[Column]:
    event_id = F.col("header_id")
    yield event_id.rlike(UUID_V7) & (F.length(event_id) == UUID_LENGTH)
    # The first 12 digits are the time in milliseconds, so they compare as they are.
    limit = F.lpad(F.hex(F.unix_millis(F.current_timestamp()) + FUTURE_LIMIT_MS), 12, "0")
    yield F.upper(F.concat(F.substring(event_id, 1, 8), F.substring(event_id, 10, 4))) <= limit
    for name, rule in _checked(headers).items():
        value = F.col(f"header_{name}")
        conditions = _all(F.lit(True), *_constraints(f"header {name}", value, rule))
        if name in headers.get("required", ()):
            yield value.isNotNull() & conditions
        else:
            yield value.isNull() | conditions


def _constraints(name: str, value: Column, rule: Schema) -> Iterator[Column]:
    """What the schema wants of a value beside its type. Raises Failure for what cannot be expressed."""
    for keyword, wanted in rule.items():
        match keyword, wanted:
            case "pattern", str():
                yield value.rlike(wanted)
            case "minLength", int():
                yield F.length(value) >= wanted
            case "maxLength", int():
                yield F.length(value) <= wanted
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
                yield value.rlike(UUID) & (F.length(value) == UUID_LENGTH)
            case "format", "date-time":
                pass  # it is read as a timestamp
            case _ if keyword not in ANNOTATIONS:
                raise Failure(
                    f"the event schema constrains {name} by `{keyword}: {wanted}`, which the sink cannot check",
                    "express it by type, pattern, length, minimum, maximum, enum, const or `not: {const: …}`",
                )


def _all(*conditions: Column) -> Column:
    return functools.reduce(operator.and_, conditions)
