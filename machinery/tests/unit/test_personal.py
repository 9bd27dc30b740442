"""No message repeats a value of an event with personal data: a marker is put everywhere, and everything is broken."""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import structlog
from pydantic import BaseModel

from outbox.base import log
from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.events.schema import Rejection
from outbox.writing import event
from outbox.writing.event import Event
from outbox_lab.testing.failures import raises
from tests.support.declared import EXAMPLE, Events, payload, schema_of
from tests.support.declared_sinks import decoder, record

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
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Events:
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


@pytest.mark.usefixtures("events")
@pytest.mark.parametrize("what", UNUSABLE)
def test_append_repeats_no_value(what: str) -> None:
    """Neither a warning, the failure nor what it comes from has the marker."""
    with warnings.catch_warnings(record=True, action="always") as caught, pytest.raises(Failure) as failed:
        event.rows([UNUSABLE[what]])
    assert failed.value.code == ("event-key-mismatch" if what == "another key" else "event-invalid")
    assert hidden("".join(traceback.format_exception(failed.value)))
    assert caught == []


@pytest.mark.parametrize("what", BROKEN)
def test_a_sink_repeats_no_value(events: Events, what: str) -> None:
    found = decoder(events.load(), "order").record(record("placed", EXAMPLE | BROKEN[what]))
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
def test_an_upcaster_that_fails_repeats_no_value(events: Events, newer: dict[str, Any], body: str) -> None:
    events.aggregate("order", placed_v2=newer).write("order/upcast.py", f"def placed_v1(payload):\n    {body}\n")
    one = record("placed", EXAMPLE | {"email": f"{MARKER}@a.example"})
    found = decoder(events.load(), "order.placed").record(one)
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
