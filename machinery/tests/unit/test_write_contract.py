"""The contract of an event: append refuses what a sink would set aside, and writes what it has validated; a reader
takes any declared schema, and older versions. No message repeats a value of an event with personal data: a marker is
put everywhere, and everything is broken.
"""

from __future__ import annotations

import functools
import json
import logging
import pickle
import sys
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from enum import IntEnum, StrEnum
from io import StringIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from outbox.base import log, project
from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.events.catalog import Wanted
from outbox.events.schema import DETAIL_MAX_CHARACTERS, Rejection, shortened
from outbox.events.upcasting import UPCAST_FAILED, Upcaster
from outbox.events.values import NOT_ENCODABLE, encode
from outbox.sink.decoding.decoder import DecodedEvent, EventDecoder, Skipped
from outbox.sink.decoding.records import Record
from outbox.writing import event
from outbox.writing.event import Event, rows
from outbox_lab.testing.failures import raises
from tests.support import record_corpus
from tests.support.declared import EXAMPLE, Events, payload, schema_of
from tests.support.declared_sinks import decoder, record
from tests.support.made_events import NOW_MS, as_read
from tests.unit.test_decoding import both_ways

ID = "01a1fc75-167d-7239-af57-d1ee1a62e0a6"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["order_id", "cents"],
    "properties": {
        "order_id": {"type": "string", "format": "uuid"},
        "cents": {"type": "number", "minimum": 0},
        "at": {"type": "string", "format": "date-time"},
        "note": {"type": ["string", "null"]},
        "lines": {"type": "array"},
    },
}

Declare = Callable[..., None]


@pytest.fixture
def declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Declare:
    """Makes the project of this process one that declares order.placed.v1."""

    def declare(schema: dict[str, Any] = SCHEMA) -> None:
        (tmp_path / "pyproject.toml").write_text("[tool.outbox]\n")
        Events(tmp_path / "connect" / "events").aggregate("order", 'key = "order_id"', placed_v1=schema)
        monkeypatch.setenv(project.VARIABLE, str(tmp_path))

    return declare


def written(payload: object, key: str = ID) -> str:
    """The text that is inserted as the payload of order.placed.v1."""
    (row,) = rows([Event("order", key, "placed", payload)])
    assert isinstance(row["payload"], str)
    return row["payload"]


# What is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "file"),
    [
        (Event("order", ID, "placed", {}, schema_version=2), "order/placed.v2.schema.json"),
        (Event("order", ID, "paid", {}), "order/paid.v1.schema.json"),
        (Event("", "", "", None), ".v1.schema.json"),
    ],
)
def test_an_undeclared_event_is_refused_with_the_file_to_write(declare: Declare, event: Event, file: str) -> None:
    declare()
    with raises("event-undeclared", file):
        rows([event])


def test_a_deprecated_event_is_refused(declare: Declare) -> None:
    declare({**SCHEMA, "deprecated": True})
    with raises("event-deprecated", "order.placed.v1", "order/placed.v1.schema.json"):
        written({"order_id": ID, "cents": 1})


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
DEEP = functools.reduce(lambda inner, _: [inner], range(250), list[Any]())


class Cents(BaseModel):
    """A payload whose text is not that of its schema."""

    cents: str


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"cents": -1}, ["$.cents"]),
        ({"cents": float("nan")}, ["NaN"]),
        ({"lines": [{"deep": [None, float("-inf")]}]}, ["NaN"]),
        ({"other": (1.5, {float("nan")})}, ["NaN"]),
        ({"cents": Decimal("NaN")}, ["JSON"]),
        ({"cents": Decimal("1E+400")}, ["out of range"]),
        ({"cents": Decimal(f"0.{'1' * 950}E-90")}, ["out of range"]),
        ({"note": "a\0b"}, ["$.note", "NUL"]),
        ({"lines": ["a\0b"]}, ["$.lines", "NUL"]),
        ({"\0": 1}, ["NUL"]),
        ({"note": "\ud800"}, ["surrogates"]),
        ({"at": datetime(2026, 1, 1)}, ["$.at"]),
        ({"at": "0001-01-01T00:00:00+12:00"}, ["$.at"]),
        ({"lines": [object()]}, ["object"]),
        ({"lines": ENDLESS}, []),
        ({"lines": DEEP}, []),
        ({("a", 1): 1}, ["tuple"]),
        *((payload, list[str]()) for payload in (None, ENDLESS, "{}", b"{}", 1, Cents, Cents(cents="1"))),
    ],
)
def test_an_invalid_payload_is_refused_and_its_property_named(
    declare: Declare, changed: dict[Any, Any] | object, parts: list[str]
) -> None:
    declare()
    with raises("event-invalid", "order.placed.v1", *parts):
        written({"order_id": ID, "cents": 1, **changed} if isinstance(changed, dict) else changed)


@pytest.mark.parametrize("column", ["aggregateid", "traceparent"])
def test_a_column_that_would_not_fit_into_a_record_is_refused(declare: Declare, column: str) -> None:
    declare()
    event = Event("order", ID, "placed", {"order_id": ID, "cents": 1})
    too_long: dict[str, Any] = {column: "ä" * 501}  # 1002 bytes
    with raises("event-invalid", column):
        rows([event, replace(event, **too_long)])


@pytest.mark.parametrize("key", ["", ID.upper(), f"{ID} ", str(uuid.UUID(int=1)), None, uuid.UUID(ID)])
def test_a_key_that_the_payload_does_not_repeat_is_refused(declare: Declare, key: Any) -> None:
    declare()
    with raises("event-key-mismatch", "order_id", ID):
        written({"order_id": ID, "cents": 1}, key)


def test_a_key_that_is_a_uuid_has_one_spelling(declare: Declare) -> None:
    declare()
    with raises("event-invalid", "$.order_id", "[0-9a-f]{8}-"):
        written({"order_id": ID.upper(), "cents": 1}, ID.upper())


def test_the_text_of_a_number_is_its_key(declare: Declare) -> None:
    number = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
    declare({"type": "object", "required": ["order_id"], "properties": {"order_id": number}})
    assert written({"order_id": 7}, "7") == '{"order_id":7}'
    assert written({"order_id": 7.0}, "7") == '{"order_id":7.0}'
    with raises("event-key-mismatch"):
        written({"order_id": 7}, "07")


class Extra(BaseModel):
    """A model that says little about its values. Pydantic itself writes null for those that are no numbers."""

    extra: Any = None
    rate: float = 1.0


@dataclass
class Holder:
    """A payload that holds a model."""

    held: Extra


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_no_model_makes_null_of_what_is_no_number(value: float) -> None:
    deep, mapped, rated = Extra(extra={"deep": [(1, {"a": value})]}), Extra(extra={1: {2, value}}), Extra(rate=value)
    for one in (deep, mapped, rated, Extra(extra=rated), {"lines": [deep]}, Holder(rated)):
        with pytest.raises(ValueError, match="NaN"):
            encode(one)


# Typed objects -----------------------------------------------------------------------------------------------------


class Unit(StrEnum):
    """A text with a name."""

    KGM = "KGM"


class Level(IntEnum):
    """A number with a name."""

    HIGH = 3


class Text(str):
    """As markupsafe's and others."""


@dataclass(frozen=True)
class OfDataclass:
    """A payload as a dataclass."""

    order_id: uuid.UUID
    cents: Decimal
    at: datetime


class OfModel(BaseModel):
    """A payload as a model; its Decimal would be a text in JSON."""

    order_id: uuid.UUID
    cents: int
    at: datetime


AT = datetime(2026, 11, 21, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            OfDataclass(uuid.UUID(ID), Decimal("7.10"), AT),
            f'{{"order_id":"{ID}","cents":7.10,"at":"2026-11-21T10:00:00Z"}}',
        ),
        (
            OfModel(order_id=uuid.UUID(ID), cents=7, at=AT),
            f'{{"order_id":"{ID}","cents":7,"at":"2026-11-21T10:00:00Z"}}',
        ),
        (MappingProxyType({"order_id": uuid.UUID(ID), "at": AT}), f'{{"order_id":"{ID}","at":"2026-11-21T10:00:00Z"}}'),
        ({Text("x"): Unit.KGM, 1: Text("y")}, '{"x":"KGM","1":"y"}'),
        ([Cents(cents="7"), (Level.HIGH,)], '[{"cents":"7"},[3]]'),
        ([Decimal("0.12345678901234567890123"), 2**70], f"[0.12345678901234567890123,{2**70}]"),
    ],
)
def test_a_value_is_written_exactly(value: object, text: str) -> None:
    assert encode(value).decode() == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("ab\0", max_size=2), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_any_json_is_written_as_pythons_own_would_be_or_refused(value: object) -> None:
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        with pytest.raises(NOT_ENCODABLE):
            encode(value)
    else:
        assert json.loads(encode(value)) == json.loads(text)


# What a reader makes of it -----------------------------------------------------------------------------------------

CODE = {"code": {"type": "string", "pattern": "^[A-Z]{3}$"}}


def decoder_of(folder: Path, rule: dict[str, Any], *, is_required: bool = True) -> EventDecoder:
    """The decoder of an event with a key and a property ``it``."""
    names = ["order", *(["it"] if is_required else [])]
    document = {"required": names, "properties": {"order": {"type": "string"}, "it": rule}, "$defs": CODE}
    return decoder(Events(folder).aggregate("order", 'key = "order"\n', placed_v1=document).load(), "order")


def decode(decoder: EventDecoder, text: str) -> DecodedEvent | Rejection | Skipped:
    """The event of a record with this JSON; it is decoded by columns too."""
    headers = [("id", record_corpus.ID.encode()), ("eventType", b"placed"), ("schemaVersion", b"1")]
    record = Record(b"a", headers, f'{{"order": "a", "it": {text}}}'.encode(), NOW_MS)
    both_ways(as_read(record), decoder)
    return decoder.record(record)


@pytest.mark.parametrize(
    ("rule", "is_required", "type_", "is_nullable"),
    [
        ({"type": "string"}, True, "text", False),
        ({"type": "string"}, False, "text", True),
        ({"type": ["string", "null"]}, True, "text", True),
        ({"type": "string", "format": "date-time"}, True, "timestamptz", False),
        ({"type": "integer"}, True, "numeric", False),
        ({"type": "integer", "minimum": 1, "maximum": 9}, True, "bigint", False),
        ({"type": "number"}, True, "numeric", False),
        ({"type": "boolean"}, True, "boolean", False),
        ({"enum": ["x", None]}, True, "text", True),
        ({"$ref": "#/$defs/code"}, True, "text", False),
        ({}, True, "jsonb", True),
    ],
)
def test_a_property_becomes_a_column(
    tmp_path: Path, rule: dict[str, Any], is_required: bool, type_: str, is_nullable: bool
) -> None:
    declared = decoder_of(tmp_path, rule, is_required=is_required)
    assert declared.types["order.placed"][1] == ("it", type_, is_nullable)


@pytest.mark.parametrize(
    ("rule", "text", "value"),
    [
        ({"type": "number"}, "0.12345678901234567890123", "0.12345678901234567890123"),
        ({"type": "object"}, r'{"a":"\\u0000"}', r'{"a":"\\u0000"}'),
        ({"type": "array"}, "[{}, 1.10]", "[{},1.10]"),
        ({"enum": ["x", None]}, "null", None),
        ({"type": "boolean"}, "true", True),
        ({}, '{"any":[null]}', '{"any":[null]}'),
        ({"type": "integer"}, "-7.0", "-7.0"),
    ],
)
def test_a_value_is_read_exactly(tmp_path: Path, rule: dict[str, Any], text: str, value: object) -> None:
    found = decode(decoder_of(tmp_path, rule), text)
    assert isinstance(found, DecodedEvent)
    assert found.values == ("a", value)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"type": "object"}, r'{"\u0000":1}'),
        ({"type": "object"}, r'{"a":"\\\u0000"}'),
        ({"type": "string", "format": "date-time"}, '"9999-12-31T23:59:59-23:59"'),
        ({"type": "string", "format": "date-time"}, '"0000-12-31T10:00:00-14:00"'),
        ({"type": "string", "format": "date-time"}, '"2016-12-31T23:59:60Z"'),
        ({"type": "string"}, r'"a\u0000"'),
        ({"$ref": "#/$defs/code"}, r'"EUR\n"'),
    ],
)
def test_what_postgres_cannot_hold_is_set_aside(tmp_path: Path, rule: dict[str, Any], text: str) -> None:
    found = decode(decoder_of(tmp_path, rule), text)
    assert isinstance(found, Rejection)
    assert found.reason == "schema violation"


# Details and executors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\0b", r"a\x00b"),
        ("\x1b[2J\r\n\t", r"\x1b[2J\r\n\t"),
        ("\x7f\x9b\u202e\u2028", r"\x7f\x9b\u202e\u2028"),
        ("half \ud800", r"half \ud800"),
        ("ü \U0001f600 \\ n", "ü \U0001f600 \\ n"),
    ],
)
def test_detail_has_printable_characters_only(text: str, shown: str) -> None:
    assert shortened(text) == shown
    assert len(shortened(text * 1_000_000)) == DETAIL_MAX_CHARACTERS + 1


@pytest.mark.parametrize("rule", [{"additionalProperties": False}, {"additionalProperties": {"type": "string"}}])
@pytest.mark.parametrize("name", ["a\0b", "\x1b]0;title\x07"])
def test_name_of_a_property_at_fault_is_printable(rule: dict[str, Any], name: str) -> None:
    violation = schema_of({"properties": {"m": {"type": "object", **rule}}}).violation({"m": {name: 1}})
    assert violation is not None
    assert violation.detail.isprintable()
    assert "$.m" in violation.detail


# Older versions ----------------------------------------------------------------------------------------------------

NEWER = payload({"label": {"type": "string", "maxLength": 5}}, ("label",))
UPCAST = "def placed_v1(payload):\n    return {**payload, 'label': ''}\n"


@pytest.fixture
def events(tmp_path: Path) -> Events:
    return Events(tmp_path).aggregate("order", placed_v1=payload(), placed_v2=NEWER)


def wanted(events: Events, source: str) -> Wanted:
    events.write("order/upcast.py", source)
    [found] = events.load().wanted(["order.placed"])
    return found


def upcaster(events: Events, source: str) -> Upcaster:
    found = wanted(events, source).accepts[1][1]
    assert found is not None
    return found


def test_versions_are_passed_one_by_one(events: Events) -> None:
    events.aggregate("order", placed_v4=payload({"label": {"type": "string"}, "more": {"type": "integer"}}, ("more",)))
    source = (
        "def placed_v1(payload):\n    return {**payload, 'label': 'a'}\n"
        "def placed_v2(payload):\n    return {**payload, 'more': len(payload['label'])}\n"
    )
    accepts = wanted(events, source).accepts
    assert {version: one is None for version, (_, one) in sorted(accepts.items())} == {1: False, 2: False, 4: True}
    assert [one.upcast(EXAMPLE | {"label": "bc"}) for _, one in accepts.values() if one] == [
        {**EXAMPLE, "label": "a", "more": 1},
        {**EXAMPLE, "label": "bc", "more": 2},
    ]


def test_executor_needs_no_file(events: Events) -> None:
    found = upcaster(events, UPCAST)
    found.upcast(EXAMPLE)
    sent = pickle.dumps(found)
    (events.folder / "order" / "upcast.py").unlink()
    assert pickle.loads(sent).upcast(EXAMPLE) == {**EXAMPLE, "label": ""}  # noqa: S301


@pytest.mark.parametrize(
    "returned",
    [
        *("None", "5", "{}", "payload", "{**payload, 'label': 1}", "{**payload, 'label': 'too long'}"),
        *("{**payload, 'label': object()}", "{**payload, 'label': '\\ud800'}"),
        "{**payload, 'label': '', 'x': [None, {'y': -1e999}]}",
        *("payload['missing']", "1 / 0", "exit(3)", "(_ for _ in ()).throw(GeneratorExit)", "placed_v1(payload)"),
        "(lambda one: one.update(x=one) or one)({**payload, 'label': ''})",
    ],
)
def test_mistake_sets_the_event_aside(events: Events, returned: str) -> None:
    found = upcaster(events, f"def placed_v1(payload):\n    return {returned}\n").upcast(EXAMPLE)
    assert isinstance(found, Rejection)
    assert found.reason == UPCAST_FAILED
    assert found.detail.startswith("placed_v1: ")


def test_result_is_read_as_json_and_the_caller_keeps_its_payload(events: Events) -> None:
    source = (
        "import uuid\n"
        "def placed_v1(payload):\n"
        "    payload['label'] = ''\n"
        "    return {**payload, 'a': uuid.UUID(int=1), 'b': (1, 2), 'c': 0.5, 'd': 2**70}\n"
    )
    passed = dict(EXAMPLE)
    found: Any = upcaster(events, source).upcast(passed)
    assert (found["a"], found["b"], found["d"]) == ("00000000-0000-0000-0000-000000000001", [1, 2], 2**70)
    assert (type(found["c"]), found["c"]) == (Decimal, Decimal("0.5"))
    assert passed == EXAMPLE


@pytest.mark.parametrize(
    ("source", "code", "part"),
    [
        *(
            (source, "event-declaration-unusable", "upcast.py")
            for source in (b"def placed_v1(payload:", b"import nowhere")
        ),
        *((source, "event-declaration-unusable", "upcast.py") for source in (b"raise SystemExit", b"\0", b"\xff\n")),
        *((source, "upcaster-missing", "def placed_v1(payload)") for source in (b"", b"placed_v1 = 5\n")),
    ],
)
def test_file_that_cannot_run_or_lacks_the_function_is_named(
    events: Events, source: bytes, code: str, part: str
) -> None:
    events.write("order/upcast.py", "")
    (events.folder / "order" / "upcast.py").write_bytes(source)
    with raises(code, part):
        events.load().wanted(["order"])


# Personal data ------------------------------------------------------------------------------------------------------

MARKER = "8c5d1c1e-9b0d-4c52-a3a5-7f5e2f1f0c11"
PERSON = {"type": "object", "properties": {"name": {"type": "string", "x-personal": True}}}
PROPERTIES = {
    "email": {"type": "string", "format": "email", "maxLength": 50, "x-personal": True},
    "born": {"type": "string", "format": "date-time", "x-personal": True},
    "weight": {"type": "number", "x-personal": True},
    "people": {"type": "array", "items": {"$ref": "#/$defs/person"}},
    "phones": {"type": "object", "additionalProperties": {"type": "string", "x-personal": True}},
    "note": {"type": "string", "maxLength": 5},
}
DECLARED = payload(PROPERTIES, additionalProperties=False) | {"$defs": {"person": PERSON}}
BROKEN: dict[str, dict[str, Any]] = {
    "a text of another format": {"email": MARKER},
    "a text that is too long": {"email": MARKER * 2},
    "another type": {"weight": MARKER},
    "no time that Postgres knows": {"born": "1998-12-31T23:59:60Z"},
    "something nested": {"people": [{"name": [MARKER]}]},
    "a name as a key": {"phones": {MARKER: 1}},
    "an undeclared property": {MARKER: 1},
    "a property that is not personal": {"note": MARKER},
    "a number out of range": {"weight": 9.99999999e300},
    "a text with NUL": {"email": f"{MARKER}@a.example\0"},
}


@pytest.fixture
def personal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Events:
    """The declared events, which `append` knows."""
    events = Events(tmp_path).aggregate("order", placed_v1=DECLARED)
    monkeypatch.setattr(event, "declared", lambda _: events.load())
    return events


def test_annotations_are_found_in_any_depth(tmp_path: Path) -> None:
    for name, rule in PROPERTIES.items():
        declared = payload({name: rule}) | {"$defs": {"person": PERSON}}
        assert schema_of(declared).is_personal == (name != "note"), name
    assert schema_of(payload() | {"patternProperties": {"^x": {"x-personal": True}}}).is_personal
    assert not schema_of(payload({"note": {"type": "string", "x-personal": False}})).is_personal
    with raises("schema-unusable", "x-personal"):
        schema_of(payload({"note": {"type": "string", "x-personal": "yes"}}))
    with raises("event-declaration-unusable", "number"):  # the version
        declared = payload({"number": {**payload()["properties"]["number"], "x-personal": True}})
        Events(tmp_path).aggregate("order", placed_v1=declared).load()


class Customer:
    """A payload with more than its attributes, which is no JSON."""

    def __init__(self, **more: object) -> None:
        vars(self).update(EXAMPLE | {"email": MARKER} | more)

    def model_dump(self, **_: object) -> object:
        raise ValueError(f"no JSON: {vars(self)}")


class Model(BaseModel):
    """A payload whose attribute is not of its type."""

    id: str = "a"
    number: int = 1
    weight: float = 1

    def __init__(self) -> None:
        super().__init__()
        vars(self)["weight"] = MARKER


UNUSABLE = {
    **{name: Event("order", "a", "placed", EXAMPLE | change) for name, change in BROKEN.items()},
    "an object": Event("order", "a", "placed", Customer(email=object())),
    "no number": Event("order", "a", "placed", Customer(weight=float("nan"))),
    "keys": Event("order", "a", "placed", Customer(email={MARKER: MARKER}.keys())),
    "a model": Event("order", "a", "placed", Model()),
    "another key": Event("order", MARKER, "placed", EXAMPLE),
}


@pytest.mark.usefixtures("personal")
@pytest.mark.parametrize("what", UNUSABLE)
def test_append_repeats_no_value(what: str) -> None:
    """Neither a warning, the failure nor what it comes from has the marker."""
    with warnings.catch_warnings(record=True, action="always") as caught, pytest.raises(Failure) as failed:
        event.rows([UNUSABLE[what]])
    assert failed.value.code == ("event-key-mismatch" if what == "another key" else "event-invalid")
    assert hidden("".join(traceback.format_exception(failed.value)))
    assert caught == []


@pytest.mark.parametrize("what", BROKEN)
def test_a_sink_repeats_no_value(personal: Events, what: str) -> None:
    found = decoder(personal.load(), "order").record(record("placed", EXAMPLE | BROKEN[what]))
    assert isinstance(found, Rejection)
    assert hidden(str(found))


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError(payload['email'])",
        "return {**payload, 'weight': payload['email']}",
        "return {**payload, payload['email']: object()}",
    ],
)
@pytest.mark.parametrize("newer", [DECLARED, payload({"weight": {"type": "number"}})], ids=["personal", "not"])
def test_an_upcaster_that_fails_repeats_no_value(personal: Events, newer: dict[str, Any], body: str) -> None:
    personal.aggregate("order", placed_v2=newer).write("order/upcast.py", f"def placed_v1(payload):\n    {body}\n")
    one = record("placed", EXAMPLE | {"email": f"{MARKER}@a.example"})
    found = decoder(personal.load(), "order.placed").record(one)
    assert isinstance(found, Rejection)
    assert found.reason == "upcast failed"
    assert hidden(str(found))


@pytest.mark.parametrize(("format_", "is_personal"), [("text", True), ("json", True), ("json", False)])
def test_a_traceback_has_frames_and_no_messages(
    format_: str, is_personal: bool, logged: Callable[[str, bool], StringIO]
) -> None:
    out = logged(format_, is_personal)
    try:
        fail(MARKER)
    except Failure as failure:
        log.get("test").error("unexpected error", exc_info=failure)
        logging.getLogger("a library").error("failed", exc_info=failure)
    found = out.getvalue()
    assert hidden(found) == is_personal
    assert found.count("Failure: a message of ours") == 2
    assert found.count("ValueError") == 2


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, bool], StringIO]]:
    """Configures the log, and returns what is written there."""
    handlers, level = logging.getLogger().handlers, logging.getLogger().level

    def configure(format_: str, is_personal: bool) -> StringIO:
        out = StringIO()
        monkeypatch.setattr(sys, "stderr", out)
        log.configure(load(environment=False).replace(log_format=format_), is_personal=is_personal)
        return out

    yield configure
    structlog.reset_defaults()
    logging.getLogger().handlers, logging.getLogger().level = handlers, level


def fail(value: str) -> None:
    person = {"name": value}
    try:
        int(person["name"])
    except ValueError as error:
        raise Failure("a message of ours") from error


def hidden(text: str) -> bool:
    """Whether neither the marker, as it is or cut off, nor the odd number and time are in a text."""
    return not any(part in text for part in (MARKER[:8], "9" * 8, "59:60"))
