"""Why a record cannot be applied: the contract in full, told by JSON Schema's own library.

The stream lets pass what is surely valid (`outbox.sink.decode`) and asks here about the rest: few records, one by one.
A replay of dead letters asks again, and takes from here the event of a record that has no fault any more.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator

Header = tuple[str, bytes | None]

UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
UUID_V7 = re.compile(r".{14}7.{4}[89ab].{16}")  # of what is a UUID
NO_TEXT = re.compile("[\0\ud800-\udfff]")  # NUL, and halves of a pair that JSON may write alone
BIGGEST = 1e40  # beyond any integer that a column holds; to write out 1e999999 would take a while
FUTURE_LIMIT_MS = 24 * 60 * 60 * 1000
HEADER_REASONS = {"eventType": "unknown event type", "schemaVersion": "unknown schema version"}


class Verdict(NamedTuple):
    """The kind of fault, from a short list to filter by, and words for the one that was found."""

    reason: str
    detail: str


# A replay, which is in no hurry, reads such a record.
UNREADABLE = Verdict("unreadable", "as the schema wants it, but written as the stream does not read it, like 5.0 for 5")


class Judging(ABC):
    """Judges records: the one below, or one of your own where records look otherwise. ``key`` is the staged column that
    the record's key tells.
    """

    key: str

    @abstractmethod
    def judge(
        self, key: bytes | None, headers: Sequence[Header], value: bytes | None, recorded_ms: int
    ) -> Verdict | dict[str, Any]:
        """What is wrong with a record, or, if nothing is, its staged columns but for id and place."""

    def verdict(self, key: bytes | None, headers: Sequence[Header], value: bytes | None, recorded_ms: int) -> Verdict:
        """What is wrong with a record that the stream did not let pass. There is always an answer."""
        found = self.judge(key, headers, value, recorded_ms)
        return found if isinstance(found, Verdict) else UNREADABLE


class Judge(Judging):
    """Judges records by a JSON Schema of the value, with that of the headers under ``$defs``."""

    def __init__(self, schema: Mapping[str, Any], key: str) -> None:
        """``key`` is the property that the record's key must repeat."""
        self._properties = schema["properties"]
        self._value = Draft202012Validator(schema)
        self._headers = Draft202012Validator(schema["$defs"]["headers"])
        self.key = key

    def judge(
        self, key: bytes | None, headers: Sequence[Header], value: bytes | None, recorded_ms: int
    ) -> Verdict | dict[str, Any]:
        """What is wrong with a record, or, if nothing is, its event: the properties that the schema names.

        ``recorded_ms`` is the record's timestamp, in milliseconds since 1970.
        """
        event, fault = parse(value)
        texts = {name: None if text is None else text.decode(errors="replace") for name, text in headers}
        return (
            fault
            or _id_fault(texts.get("id"), recorded_ms)
            or self._header_fault(texts)
            or self._value_fault(event)
            or self._key_fault(key, event)
            or self._event(event)
        )

    def _event(self, event: Mapping[str, Any]) -> Verdict | dict[str, Any]:
        named = {name: event[name] for name in self._properties if name in event}
        # No property may have a fraction, so a float is an integer that was rounded on the way.
        return UNREADABLE if any(isinstance(value, float) for value in named.values()) else named

    def _header_fault(self, headers: Mapping[str, str | None]) -> Verdict | None:
        for error in self._headers.iter_errors(dict(headers)):
            names = [str(part) for part in error.path] or re.findall(r"^'(\w+)' is a required", error.message)
            reason = HEADER_REASONS.get(names[0] if names else "", "schema violation")
            return Verdict(reason, f"header {names[0] if names else ''}: {shortened(error.message)}")
        return None

    def _value_fault(self, event: Any) -> Verdict | None:
        fault = violation(self._value, event)
        if fault:
            return fault
        for name, rule in self._properties.items():
            if rule.get("format") == "date-time" and not _is_moment(event.get(name)):
                return Verdict("schema violation", f"$.{name}: there is no such date and time")
            if NO_TEXT.search(str(event.get(name))):
                return Verdict("schema violation", f"$.{name}: it contains a character that Postgres has no text for")
        return None

    def _key_fault(self, key: bytes | None, event: Any) -> Verdict | None:
        if key == str(event[self.key]).encode():
            return None
        return Verdict("key mismatch", f"the record's key is not its {self.key}")


def violation(schema: Draft202012Validator, value: Any) -> Verdict | None:
    """Where a value is not as a schema wants it."""
    for error in schema.iter_errors(value):
        return Verdict("schema violation", f"{error.json_path}: {shortened(error.message)}")
    return None


def made_at_ms(event_id: str) -> int:
    """The time inside a UUIDv7, in milliseconds since 1970."""
    return int(event_id[:8] + event_id[9:13], 16)


def parse(value: bytes | None) -> tuple[Any, Verdict | None]:
    """A record's value as JSON says it, or what keeps it from being JSON."""
    if value is None:
        return None, Verdict("no value", "the value is null: a tombstone is no event")
    try:
        event = json.loads(value.decode(), parse_constant=_refuse, parse_float=_number)
    except UnicodeDecodeError as error:
        return None, Verdict("not UTF-8", str(error.reason))
    except (ValueError, RecursionError) as error:
        return None, Verdict("not JSON", shortened(str(error)))
    return event, None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _number(text: str) -> int | float:
    """A number with a point or an exponent. An integer written so is read exactly, which a float may not be."""
    rounded = float(text)
    if abs(rounded) > BIGGEST or not rounded.is_integer():
        return rounded
    try:
        exact = Decimal(text)
    except InvalidOperation:  # an exponent beyond all bounds
        return rounded
    return int(exact) if exact == exact.to_integral_value() else rounded


def _id_fault(event_id: str | None, recorded_ms: int) -> Verdict | None:
    if event_id is None:
        return Verdict("missing id", "there is no header id")
    if not UUID.fullmatch(event_id):
        return Verdict("malformed id", f"header id: {shortened(repr(event_id))} is no UUID")
    if not UUID_V7.fullmatch(event_id):
        return Verdict("malformed id", f"header id: {event_id} is no UUIDv7")
    if made_at_ms(event_id) > recorded_ms + FUTURE_LIMIT_MS:
        return Verdict("id from the future", f"header id: {event_id} is more than a day ahead of its record")
    return None


def _is_moment(text: str | None) -> bool:
    try:
        return text is None or bool(datetime.fromisoformat(text))
    except ValueError:
        return False


def shortened(message: str) -> str:
    """Words for a letter, however long the value was."""
    limit = 200
    return message if len(message) <= limit else f"{message[:limit]}…"
