"""The contract of the events, as the service writes them and the sinks read them: a JSON Schema (draft 2020-12).

One library validates everywhere, so a keyword such as ``pattern`` means the same to the service's tests, the sinks and
`outbox check`. Properties that the schema does not name are allowed and ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jsonschema_rs

from outbox.base.errors import Failure

SqlType = Literal["uuid", "timestamptz", "bigint", "numeric", "boolean", "text", "jsonb"]

BIGINT_MIN, BIGINT_MAX = -(2**63), 2**63 - 1
DETAIL_MAX_CHARACTERS = 200


class Column(NamedTuple):
    """A property of the event as a column of Postgres."""

    name: str
    type: SqlType
    is_nullable: bool


class Violation(NamedTuple):
    """What breaks the schema: the first property or header at fault, and why."""

    name: str
    detail: str


class EventSchema:
    """A JSON Schema of the records of a topic: of the value, and under ``$defs/headers`` of the headers."""

    def __init__(self, file: Path) -> None:
        """Raises Failure if the file is missing, or is no JSON Schema of an object."""
        self.name = file.name
        try:
            self.document: dict[str, Any] = json.loads(file.read_text())
            self._compile()
        except (OSError, ValueError, jsonschema_rs.ValidationError) as error:
            raise Failure(f"event schema {file}: {error}", "correct the file", code="schema-unusable") from None
        if not isinstance(self.document.get("properties"), dict):
            raise Failure(f"event schema {file} has no properties", "correct the file", code="schema-unusable")

    def __getstate__(self) -> tuple[str, dict[str, Any]]:
        """For executors. The compiled validators stay behind and are made again."""
        return self.name, self.document

    def __setstate__(self, state: tuple[str, dict[str, Any]]) -> None:
        self.name, self.document = state
        self._compile()

    def _compile(self) -> None:
        definitions = self.document.get("$defs", {})
        # With all definitions, which it may refer to.
        headers = {"$defs": definitions, "$ref": "#/$defs/headers"} if "headers" in definitions else True
        self._value = jsonschema_rs.Draft202012Validator(self.document, validate_formats=True)
        self._headers = jsonschema_rs.Draft202012Validator(headers, validate_formats=True)

    @property
    def event_types(self) -> list[str]:
        """The values of the header ``eventType``."""
        types: list[str] = self.document["$defs"]["headers"]["properties"]["eventType"]["enum"]
        return types

    @property
    def schema_version(self) -> int:
        """The value of the header ``schemaVersion``."""
        return int(self.document["$defs"]["headers"]["properties"]["schemaVersion"]["const"])

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The named properties as columns, in their order. Objects, arrays and mixed types become ``jsonb``."""
        required = self.document.get("required", ())
        return tuple(self._column(name, rule, name in required) for name, rule in self.document["properties"].items())

    def are_values(self, values: Iterable[object]) -> bool:
        """Whether all of these are valid values of records, decoded from JSON."""
        return all(map(self._value.is_valid, values))

    def are_headers(self, headers: Iterable[Mapping[str, str | None]]) -> bool:
        """Whether all of these are valid headers of records."""
        return all(map(self._headers.is_valid, headers))

    def value_violation(self, value: object) -> Violation | None:
        """The first violation of a record's value, decoded from JSON; None if it is valid."""
        return None if self._value.is_valid(value) else _first(self._value, value, "$")

    def header_violation(self, headers: Mapping[str, str | None]) -> Violation | None:
        """The first violation of a record's headers; None if they are valid."""
        return None if self._headers.is_valid(headers) else _first(self._headers, headers, "header")

    def check_value(self, value: object) -> None:
        """Raises Failure naming the first property of a record's value that breaks the contract."""
        self._raise(self.value_violation(value))

    def check_headers(self, headers: Mapping[str, str | None]) -> None:
        """Raises Failure naming the first header of a record that breaks the contract."""
        self._raise(self.header_violation(dict(headers)))

    def _raise(self, violation: Violation | None) -> None:
        if violation is not None:
            raise Failure(f"{self.name}: {violation.detail}", code="contract-broken")

    def _column(self, name: str, rule: Any, is_required: bool) -> Column:
        rule = self._resolved(rule)
        types = _types(rule)
        is_nullable = not is_required or "null" in types or not types
        return Column(name, _sql_type(rule, types - {"null"}), is_nullable)

    def _resolved(self, rule: Any) -> Mapping[str, Any]:
        """The rule itself, or the one that it refers to within the document."""
        while isinstance(rule, dict) and str(rule.get("$ref", "")).startswith("#/"):
            target: Any = self.document
            for part in rule["$ref"].removeprefix("#/").split("/"):
                target = target[part.replace("~1", "/").replace("~0", "~")]
            rule = target
        return rule if isinstance(rule, dict) else {}


def shortened(text: str) -> str:
    """A detail for people, however long the value was. Characters that do not print are escaped.

    So it fits into a ``text`` of Postgres, which cannot hold NUL, and has no escape sequences for a terminal.
    """
    shown = "".join(map(_printable, text[: DETAIL_MAX_CHARACTERS + 1]))
    return shown if len(shown) <= DETAIL_MAX_CHARACTERS else f"{shown[:DETAIL_MAX_CHARACTERS]}…"


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _first(validator: jsonschema_rs.Draft202012Validator, instance: object, where: str) -> Violation:
    error = next(iter(validator.iter_errors(instance)))
    path = [str(part) for part in error.instance_path] or [getattr(error.kind, "property", "")]
    separator = " " if where == "header" else "."
    return Violation(path[0], shortened(f"{where}{separator}{'.'.join(path)}: {error.message}"))


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
