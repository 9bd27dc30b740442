"""The JSON Schema (draft 2020-12) of a payload, as the service writes it and the sinks read it.

One library validates everywhere, so a keyword such as ``pattern`` means the same to `append`, the sinks and
`outbox check`. Properties that the schema does not name are allowed and ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jsonschema_rs

from outbox.base.errors import Failure
from outbox.events.references import bundle, has, resolve, unusable

# No property is of the last two: a sink's `transform` may add such columns.
SqlType = Literal["uuid", "timestamptz", "bigint", "numeric", "boolean", "text", "jsonb", "double precision", "date"]

BIGINT_MIN, BIGINT_MAX = -(2**63), 2**63 - 1
# The spelling that Postgres writes. JSON Schema allows upper case too, and two spellings would be two keys to Kafka.
CANONICAL_UUID = "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
DETAIL_MAX_CHARACTERS = 200
PERSONAL = "x-personal"  # the annotation of personal data: no message repeats a value of the event
HIDDEN = "… (personal data)"


class Column(NamedTuple):
    """A property of the event as a column of Postgres."""

    name: str
    type: SqlType
    is_nullable: bool


class Violation(NamedTuple):
    """A violation of the schema: the first property at fault, and why."""

    name: str
    detail: str


class Rejection(NamedTuple):
    """Why a record is no event: the kind of fault, from a short list to filter by, and a detail for people."""

    reason: str
    detail: str


class PayloadSchema:
    """A JSON Schema of an object, the columns that its properties become, and its validator."""

    def __init__(self, name: str, document: dict[str, Any]) -> None:
        """``document`` refers to nothing outside of it. Raises Failure if it is no JSON Schema of an object."""
        self.name = name
        self.document = {**document, "type": document.get("type", "object")}
        if self.document["type"] != "object":
            raise unusable(name, "a payload is an object: its type is not")
        self._validated = self.document
        try:
            self._compile()
        except ValueError as error:  # jsonschema_rs.ValidationError is one; its first line says what is wrong
            raise unusable(name, str(error).partition("\n")[0]) from None
        try:
            parts = list(self._parts(self.document))
        except RecursionError:
            raise unusable(name, "its references form a circle") from None
        self.properties: dict[str, Any] = {}
        """The rules of the named properties, in their order."""
        for part in parts:
            for name_, rule in (part.get("properties") or {}).items():
                self.properties.setdefault(name_, rule)
        if not self.properties:
            raise unusable(name, "it has no properties")
        self.required = frozenset(name for part in parts for name in part.get("required", ()))
        """The properties that a payload must have; one may still be null."""
        self.is_personal = has(self.document, {**self.document, "$defs": {}, "definitions": {}}, PERSONAL)
        """Whether a value in the payload is personal data. Definitions count if something refers to them."""

    def __getstate__(self) -> dict[str, Any]:
        """For executors. The compiled validator stays behind and is made again."""
        return {name: value for name, value in vars(self).items() if name != "_validator"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._compile()

    def _compile(self) -> None:
        self._validator = jsonschema_rs.Draft202012Validator(self._validated, validate_formats=True)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The named properties as columns, in their order. Objects, arrays and mixed types become ``jsonb``."""
        return tuple(self._column(name, rule) for name, rule in self.properties.items())

    def are_valid(self, payloads: Iterable[object]) -> bool:
        """Whether all of these payloads, decoded from JSON, are valid."""
        return all(map(self._validator.is_valid, payloads))

    def violation(self, payload: object) -> Violation | None:
        """The first violation of a payload, decoded from JSON; None if it is valid."""
        return None if self._validator.is_valid(payload) else self._first(payload)

    def require_valid(self, payload: object) -> None:
        """Raises Failure naming the first property of a payload that breaks the contract."""
        violation = self.violation(payload)
        if violation is not None:
            raise Failure(f"{self.name}: {violation.detail}", code="event-invalid")

    def _first(self, payload: object) -> Violation:
        """The first violation. With personal data in the event it says the property and the rule, and no value."""
        error = next(iter(self._validator.iter_errors(payload)))
        path = [str(part) for part in error.instance_path] or [getattr(error.kind, "property", "")]
        if self.is_personal:
            rule = next((part for part in reversed(error.schema_path) if isinstance(part, str)), "")
            name = path[0] if path[0] in self.properties else ""
            return Violation(name, f"$.{name}: it breaks the rule {rule}")
        return Violation(path[0], shortened(f"$.{'.'.join(path)}: {error.message}"))

    def _parts(self, rule: Any) -> Iterator[Mapping[str, Any]]:
        """The schema and what it includes by ``$ref`` or ``allOf``: all of it describes the payload itself."""
        part = resolve(self.document, rule)
        yield part
        for one in part.get("allOf", ()):
            yield from self._parts(one)

    def _column(self, name: str, rule: Any) -> Column:
        rule = resolve(self.document, rule)
        types = _types(rule)
        is_nullable = name not in self.required or "null" in types or not types
        return Column(name, _sql_type(rule, types - {"null"}), is_nullable)


class EventSchema(PayloadSchema):
    """The declaration of one version of one event type. A key that is a uuid has one spelling, which is lower-case."""

    def __init__(self, aggregate: str, type_: str, version: int, document: dict[str, Any], key: str = "") -> None:
        """See `PayloadSchema`. ``key`` is the property that repeats the record's key."""
        self.aggregate, self.type, self.version = aggregate, type_, version
        super().__init__(f"{aggregate}.{type_}.v{version}", document)
        if any(column.name == key and column.type == "uuid" for column in self.columns):
            spelling = {"properties": {key: {"pattern": CANONICAL_UUID}}}
            self._validated = {**self.document, "allOf": [*self.document.get("allOf", ()), spelling]}
            self._compile()

    @property
    def event(self) -> str:
        """The event's name without its version, such as ``order.placed``."""
        return f"{self.aggregate}.{self.type}"

    @property
    def file(self) -> str:
        """The schema's file in the folder of events."""
        return f"{self.aggregate}/{self.type}.v{self.version}.schema.json"

    @property
    def is_deprecated(self) -> bool:
        """Whether it may no longer be written. Sinks still read it."""
        return bool(self.document.get("deprecated"))

    @property
    def examples(self) -> list[Any]:
        """The example payloads of its file."""
        return list(self.document.get("examples", ()))


def load(file: Path) -> PayloadSchema:
    """The JSON Schema in a file that declares no event of ours, such as Debezium's envelope.

    Raises Failure if the file is missing, or is no JSON Schema of an object.
    """
    return PayloadSchema(file.name, bundle(file, file.parent))


def shortened(text: str) -> str:
    """A detail for people, however long the value was. Characters that do not print are escaped.

    So it fits into a ``text`` of Postgres, which cannot hold NUL, and has no escape sequences for a terminal.
    """
    shown = "".join(map(_printable, text[: DETAIL_MAX_CHARACTERS + 1]))
    return shown if len(shown) <= DETAIL_MAX_CHARACTERS else f"{shown[:DETAIL_MAX_CHARACTERS]}…"


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _types(rule: Mapping[str, Any]) -> set[str]:
    if "type" in rule:
        return {rule["type"]} if isinstance(rule["type"], str) else set(rule["type"])
    values = rule.get("enum", [rule["const"]] if "const" in rule else [])
    return {"null" if value is None else "string" if isinstance(value, str) else "mixed" for value in values}


def _sql_type(rule: Mapping[str, Any], types: set[str]) -> SqlType:
    if types == {"string"}:
        formats: dict[str, SqlType] = {"uuid": "uuid", "date-time": "timestamptz"}
        return formats.get(rule.get("format", ""), "text")
    if types == {"boolean"}:
        return "boolean"
    if types == {"integer"}:
        fits = rule.get("minimum", -(2**64)) >= BIGINT_MIN and rule.get("maximum", 2**64) <= BIGINT_MAX
        return "bigint" if fits else "numeric"
    if types and types <= {"integer", "number"}:
        return "numeric"
    return "jsonb"
