"""Decode records by the JSON Schema of their event, as DataFrame code: no Python runs beside the executors.

A record that breaks the contract is no exception but a row with a ``reason``, a ``detail`` and the ``record`` itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StringType

from outbox.errors import Failure

Schema = Mapping[str, Any]

UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
UUID_V7 = "^.{14}7.{4}[89ab]"  # of what is a UUID
FUTURE_LIMIT_MS = 24 * 60 * 60 * 1000
# By JSON type: what variants call it, and the type of its column. An integer may be written 5.0, but not 5e0.
TYPES = {
    "string": (r"^STRING$", "string"),
    "integer": (r"^(BIGINT|DECIMAL\(\d+,0\))$", "bigint"),
    "boolean": (r"^BOOLEAN$", "boolean"),
}
FORMATS = {"uuid", "date-time"}
ANNOTATIONS = {"description", "title", "examples", "default", "$comment"}
HEADER_REASONS = {"eventType": "unknown event type", "schemaVersion": "unknown schema version"}


def decode(records: DataFrame, schema: Schema, key: str) -> DataFrame:
    """Decode records of Kafka's source (with headers) whose value is JSON as ``schema`` says, and whose key is the
    property ``key``.

    Returns ``event_id``, ``partition``, ``offset``, a column a property of the schema, ``header_id``, and ``reason``,
    ``detail`` and ``record`` (struct of key, headers, value), which are null but for records that break the contract.
    Raises Failure if the schema uses a keyword that is not understood here: no constraint is skipped silently.
    """
    headers: Schema = schema["$defs"]["headers"]
    properties: Mapping[str, Schema] = schema["properties"]
    # The value is parsed with a mark behind it that it cannot know: what the parser does not reach, is no JSON.
    mark = str(secrets.randbits(62))
    parsed = records.select(
        "*",
        F.col("value").cast("string").alias("_text"),
        *(_header(name).alias(f"header_{name}") for name in headers["properties"]),
    ).select("*", F.try_parse_json(F.concat(F.lit("["), "_text", F.lit(f",{mark}]"))).alias("_json"))
    typed = parsed.select(
        "*",
        (F.try_variant_get("_json", "$[1]", "string") == mark).alias("_whole"),
        F.try_variant_get("_json", "$[0]", "variant").alias("_event"),
    ).select(
        "*",
        *(_type_of(name).alias(f"_type_{name}") for name in properties),
        *(_property(name, rule).alias(name) for name, rule in properties.items()),
    )
    problems = F.coalesce(
        *_value_problems(),
        *_header_problems(headers),
        *_property_problems(schema),
        _problem(~F.col("key").cast("string").eqNullSafe(F.col(key)), "key mismatch", f"the key is not {key}"),
    )
    checked = typed.withColumn("_problem", problems)
    return checked.select(
        F.col("header_id").alias("event_id"),
        "partition",
        "offset",
        *(_column(name, rule).alias(name) for name, rule in properties.items()),
        "header_id",
        F.col("_problem.reason").alias("reason"),
        F.col("_problem.detail").alias("detail"),
        F.when(F.col("_problem").isNotNull(), F.struct("key", "headers", "value")).alias("record"),
    )


def _header(name: str) -> Column:
    """The last header of a name, as Kafka's own ``lastHeader`` has it; null if there is none."""
    named = F.filter("headers", lambda header: header["key"] == name)
    return F.try_element_at(named, F.lit(-1))["value"].cast("string")


def _type_of(name: str) -> Column:
    return F.schema_of_variant(F.try_variant_get("_event", _path(name), "variant"))


def _property(name: str, rule: Schema) -> Column:
    return F.try_variant_get("_event", _path(name), TYPES[_type(name, rule)][1])


def _column(name: str, rule: Schema) -> Column:
    return F.try_to_timestamp(F.col(name)) if rule.get("format") == "date-time" else F.col(name)


def _path(name: str) -> str:
    return f"$.{name}"


def _type(name: str, rule: Schema) -> str:
    declared = rule.get("type")
    if declared not in TYPES:
        raise Failure(f"the event schema declares {name} as {declared}", f"known are {', '.join(TYPES)}")
    return str(declared)


def _problem(wrong: Column, reason: str, detail: str) -> Column:
    """A struct of reason and detail where a condition is true; null where it is false or null."""
    return F.when(wrong, F.struct(F.lit(reason).alias("reason"), F.lit(detail).alias("detail")))


def _value_problems() -> Iterator[Column]:
    yield _problem(F.col("value").isNull(), "no value", "the value is null: a tombstone is no event")
    yield _problem(~F.is_valid_utf8("_text"), "not UTF-8", "the value is not UTF-8")
    yield _problem(~F.coalesce("_whole", F.lit(False)), "not JSON", "the value is not JSON")
    # Postgres has no text with U+0000 in it.
    yield _problem(F.contains(F.col("_text"), F.lit("\\u0000")), "schema violation", "the value contains U+0000")


def _header_problems(headers: Schema) -> Iterator[Column]:
    event_id = F.col("header_id")
    yield _problem(event_id.isNull(), "missing id", "no header id")
    yield _problem(~_matches(event_id, UUID) | (F.length(event_id) != 36), "malformed id", "header id: not a UUID")  # noqa: PLR2004
    yield _problem(~_matches(event_id, UUID_V7), "malformed id", "header id: not a UUIDv7")
    # The first 12 digits are the time in milliseconds, so they compare as they are.
    limit = F.lpad(F.hex(F.unix_millis(F.current_timestamp()) + FUTURE_LIMIT_MS), 12, "0")
    made_at = F.concat(F.substring(event_id, 1, 8), F.substring(event_id, 10, 4))
    yield _problem(F.upper(made_at) > limit, "id from the future", "header id: more than a day ahead of the clock here")
    for name, rule in headers["properties"].items():
        if name == "id":
            continue
        value = F.col(f"header_{name}")
        reason = HEADER_REASONS.get(name, "schema violation")
        if name in headers.get("required", ()):
            yield _problem(value.isNull(), reason, f"no header {name}")
        for wrong, detail in _violations(f"header {name}", value, rule):
            yield _problem(wrong, reason, detail)


def _property_problems(schema: Schema) -> Iterator[Column]:
    yield _problem(~F.coalesce(_is_object(), F.lit(False)), "schema violation", "the value is no JSON object")
    for name, rule in schema["properties"].items():
        kind = F.col(f"_type_{name}")
        if name in schema.get("required", ()):
            yield _problem(kind.isNull(), "schema violation", f"{name}: missing")
        declared = _type(name, rule)
        yield _problem(~_matches(kind, TYPES[declared][0]), "schema violation", f"{name}: not of type {declared}")
        present = kind.isNotNull()
        yield _problem(present & F.col(name).isNull(), "schema violation", f"{name}: beyond the range of {declared}")
        for wrong, detail in _violations(name, F.col(name), rule):
            yield _problem(wrong, "schema violation", detail)
        if rule.get("format") == "date-time":
            wrong = present & _column(name, rule).isNull()
            yield _problem(wrong, "schema violation", f"{name}: no such date and time")


def _is_object() -> Column:
    return F.schema_of_variant("_event").startswith("OBJECT<")


def _violations(name: str, value: Column, rule: Schema) -> Iterator[tuple[Column, str]]:  # noqa: PLR0912
    """The constraints of one value: for each, what is true where it is broken (null breaks none), and words."""
    for keyword, wanted in rule.items():
        match keyword:
            case "pattern":
                yield ~_matches(value, wanted), f"{name}: does not match {wanted}"
            case "minLength":
                yield F.length(value) < wanted, f"{name}: shorter than {wanted}"
            case "maxLength":
                yield F.length(value) > wanted, f"{name}: longer than {wanted}"
            case "minimum":
                yield value < F.lit(wanted), f"{name}: below {wanted}"
            case "maximum":
                yield value > F.lit(wanted), f"{name}: above {wanted}"
            case "enum":
                yield ~value.isin(list(wanted)), f"{name}: not one of {', '.join(map(str, wanted))}"
            case "const":
                yield value != F.lit(wanted), f"{name}: not {wanted}"
            case "not" if list(wanted) == ["const"]:
                yield value == F.lit(wanted["const"]), f"{name}: must not be {wanted['const']}"
            case "format" if wanted in FORMATS:
                if wanted == "uuid":
                    yield ~_matches(F.lower(value), UUID), f"{name}: not a UUID"
            case "type":
                continue
            case _ if keyword not in ANNOTATIONS:
                raise Failure(
                    f"the event schema constrains {name} by `{keyword}: {wanted}`, which the sink cannot check",
                    "express it by type, pattern, length, minimum, maximum, enum, const or `not: {const: …}`",
                )


def _matches(value: Column, pattern: str) -> Column:
    return value.cast(StringType()).rlike(pattern)
