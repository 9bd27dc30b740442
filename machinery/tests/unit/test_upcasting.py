"""Upcasters: from older versions of an event to the newest, whatever their code does."""

from __future__ import annotations

import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from outbox.events.catalog import Wanted
from outbox.events.schema import Rejection
from outbox.events.upcasting import UPCAST_FAILED, Upcaster, name_of
from outbox_lab.testing.failures import raises
from tests.support.declared import EXAMPLE, Events, payload

NEWER = payload({"label": {"type": "string", "maxLength": 5}}, ("label",))


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
    assert sorted(accepts) == [1, 2, 4]
    assert [one.upcast(EXAMPLE | {"label": "bc"}) for _, one in accepts.values() if one] == [
        {**EXAMPLE, "label": "a", "more": 1},
        {**EXAMPLE, "label": "bc", "more": 2},
    ]


def test_executor_needs_no_file(events: Events) -> None:
    found = upcaster(events, "def placed_v1(payload):\n    return {**payload, 'label': ''}\n")
    found.upcast(EXAMPLE)
    sent = pickle.dumps(found)
    (events.folder / "order" / "upcast.py").unlink()
    assert pickle.loads(sent).upcast(EXAMPLE) == {**EXAMPLE, "label": ""}  # noqa: S301


@pytest.mark.parametrize(
    "returned",
    [
        "None",
        "[]",
        "5",
        "{}",
        "payload",
        "{**payload, 'label': 1}",
        "{**payload, 'label': 'too long'}",
        "{**payload, 'label': object()}",
        "{**payload, 'label': '', 'x': __import__('decimal').Decimal('NaN')}",
        "{**payload, 'label': '\\ud800'}",
        "{**payload, 'label': '', 'x': float('nan')}",
        "{**payload, 'label': '', 'x': [None, {'y': -1e999}]}",
        "exit()",
        "payload['missing']",
        "1 / 0",
        "exit(3)",
        "(_ for _ in ()).throw(GeneratorExit)",
        "placed_v1(payload)",
        "(lambda one: one.update(x=one) or one)({**payload, 'label': ''})",
    ],
)
def test_mistake_sets_the_event_aside(events: Events, returned: str) -> None:
    found = upcaster(events, f"def placed_v1(payload):\n    return {returned}\n").upcast(EXAMPLE)
    assert isinstance(found, Rejection)
    assert found.reason == UPCAST_FAILED
    assert found.detail.startswith("placed_v1: ")


def test_result_is_read_as_json(events: Events) -> None:
    source = (
        "import uuid\n"
        "def placed_v1(payload):\n"
        "    return {**payload, 'label': '', 'a': uuid.UUID(int=1), 'b': (1, 2), 'c': 0.5, 'd': 2**70}\n"
    )
    found: Any = upcaster(events, source).upcast(EXAMPLE)
    assert (found["a"], found["b"], found["d"]) == ("00000000-0000-0000-0000-000000000001", [1, 2], 2**70)
    assert (type(found["c"]), found["c"]) == (Decimal, Decimal("0.5"))


def test_caller_keeps_its_payload(events: Events) -> None:
    source = "def placed_v1(payload):\n    payload['label'] = ''\n    return payload\n"
    given = dict(EXAMPLE)
    assert upcaster(events, source).upcast(given) == {**EXAMPLE, "label": ""}
    assert given == EXAMPLE


@pytest.mark.parametrize(
    "source",
    ["def placed_v1(payload:\n", "1 / 0\n", "import nowhere\n", "raise SystemExit\n", "raise GeneratorExit\n", "\0"],
)
def test_file_that_cannot_run_is_reported(events: Events, source: str) -> None:
    with raises("event-declaration-unusable", "upcast.py"):
        wanted(events, source)


@pytest.mark.parametrize("source", ["", "def placed_v2(payload):\n    return payload\n", "placed_v1 = 5\n"])
def test_missing_function_is_named(events: Events, source: str) -> None:
    with raises("upcaster-missing", "def placed_v1(payload)"):
        wanted(events, source)


def test_function_of_a_dotted_type() -> None:
    assert name_of("line.taken-back", 2) == "line_taken_back_v2"
