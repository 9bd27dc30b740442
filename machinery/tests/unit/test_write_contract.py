"""append refuses what a sink would set aside, and writes exactly what it has validated."""

from __future__ import annotations

import functools
import json
import uuid
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from enum import IntEnum, StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from outbox.base import project
from outbox.events.values import NOT_ENCODABLE, encode
from outbox.writing.event import Event, rows
from outbox_lab.testing import check_events
from outbox_lab.testing.failures import raises
from tests.support.declared import Events

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
        ({"cents": None}, ["$.cents"]),
        ({"cents": float("nan")}, ["NaN"]),
        ({"note": float("inf")}, ["NaN"]),
        ({"lines": [{"deep": [None, float("-inf")]}]}, ["NaN"]),
        ({"other": (1.5, {float("nan")})}, ["NaN"]),
        ({"cents": Decimal("NaN")}, ["JSON"]),
        ({"cents": Decimal("Infinity")}, ["JSON"]),
        ({"cents": Decimal("1E+400")}, ["out of range"]),
        ({"cents": Decimal(f"0.{'1' * 950}E-90")}, ["out of range"]),
        ({"lines": [Decimal(f"{'1' * 950}E-999")]}, ["out of range"]),
        ({"note": "a\0b"}, ["$.note", "NUL"]),
        ({"lines": ["a\0b"]}, ["$.lines", "NUL"]),
        ({"other": "a\0b"}, ["NUL"]),
        ({"\0": 1}, ["NUL"]),
        ({"note": "\ud800"}, ["surrogates"]),
        ({"at": datetime(2026, 1, 1)}, ["$.at"]),
        ({"at": "0001-01-01T00:00:00+12:00"}, ["$.at"]),
        ({"lines": [object()]}, ["object"]),
        ({"lines": ENDLESS}, []),
        ({"lines": DEEP}, []),
        ({("a", 1): 1}, ["tuple"]),
        ({None: 1}, ["NoneType"]),
    ],
)
def test_an_invalid_payload_is_refused_and_its_property_named(
    declare: Declare, changed: dict[Any, Any], parts: list[str]
) -> None:
    declare()
    with raises("event-invalid", "order.placed.v1", *parts):
        written({"order_id": ID, "cents": 1, **changed})


@pytest.mark.parametrize("payload", [None, [], "{}", b"{}", 1, Cents, Cents(cents="1")], ids=repr)
def test_a_payload_that_is_no_object_of_the_schema_is_refused(declare: Declare, payload: object) -> None:
    declare()
    with raises("event-invalid", "order.placed.v1"):
        written(payload)


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
    inner: list[Extra] = []


@dataclass
class Holder:
    """A payload that holds a model."""

    held: Extra


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(
    "model",
    [
        lambda value: Extra(extra={"deep": [None, (1, {"a": value})]}),
        lambda value: Extra(extra={1: {2, value}}),
        lambda value: Extra(extra=Extra(extra=value)),
        lambda value: Extra(inner=[Extra(extra=value)]),
        lambda value: Extra(rate=value),
        lambda value: {"lines": [Extra(extra=[value])]},
        lambda value: Holder(Extra(extra=[value])),
    ],
)
def test_no_model_makes_null_of_what_is_no_number(value: float, model: Callable[[float], object]) -> None:
    with pytest.raises(ValueError, match="NaN"):
        encode(model(value))


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


class OfStruct(msgspec.Struct):
    """A payload as a Struct."""

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
    ("payload", "cents"),
    [
        (OfDataclass(uuid.UUID(ID), Decimal("7.10"), AT), "7.10"),
        (OfStruct(uuid.UUID(ID), Decimal("7.10"), AT), "7.10"),
        (OfModel(order_id=uuid.UUID(ID), cents=7, at=AT), "7"),
        (MappingProxyType({"order_id": uuid.UUID(ID), "cents": 7, "at": AT}), "7"),
        (UserDict({"order_id": ID, "cents": 7, "at": "2026-11-21T10:00:00Z"}), "7"),
    ],
)
def test_a_typed_object_is_written_as_its_json(declare: Declare, payload: object, cents: str) -> None:
    declare()
    assert written(payload) == f'{{"order_id":"{ID}","cents":{cents},"at":"2026-11-21T10:00:00Z"}}'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Unit.KGM, '"KGM"'),
        (Level.HIGH, "3"),
        (Text("x"), '"x"'),
        ({Text("x"): Unit.KGM}, '{"x":"KGM"}'),
        ({1: 2}, '{"1":2}'),
        ("null", '"null"'),
        ([None, 1.5], "[null,1.5]"),
        ([Cents(cents="7"), (Level.HIGH,)], '[{"cents":"7"},[3]]'),
        (Decimal("0.12345678901234567890123"), "0.12345678901234567890123"),
        (2**70, str(2**70)),
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


def test_a_project_tests_its_events_without_a_database(declare: Declare) -> None:
    declare()
    good = Event("order", ID, "placed", {"order_id": ID, "cents": 1})
    check_events(good)
    with raises("event-invalid"):
        check_events(good, Event("order", ID, "placed", {"order_id": ID, "cents": -1}))
