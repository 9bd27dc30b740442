"""Typed payloads: what `outbox events types` writes, when it is stale, and which mistakes mypy finds with it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest

from outbox.base.project import Project
from outbox.events.values import as_json
from outbox.writing.event import Event
from outbox_lab.events import payloads
from outbox_lab.testing.failures import raises
from tests.support.declared import Events, payload
from tests.support.paths import ROOT

ITEM = {"type": "object", "required": ["product"], "properties": {"product": {"$ref": "#/$defs/code"}}}
COMMON = {"$defs": {"code": {"type": "string", "pattern": "^[A-Z]+$"}, "items": {"type": "array", "items": ITEM}}}
PROPERTIES: dict[str, Any] = {
    "uuid": {"type": "string", "format": "uuid"},
    "moment": {"type": "string", "format": "date-time"},
    "day": {"type": "string", "format": "date"},
    "address": {"type": "string", "format": "ipv4"},
    "price": {"type": ["number", "null"], "minimum": 0},
    "kind": {"enum": ["a", "b"]},
    "items": {"$ref": "../common.schema.json#/$defs/items"},
    "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
    "tree": {"$ref": "#/$defs/node"},
    "class": {"type": "boolean"},
    "place-x": {"description": 'Where "x" is, \\ or é.', "type": "integer"},
    "Struct": {"type": "string"},
}
NODE = {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
VALUES: dict[str, Any] = {
    "id": "a",
    "number": 1,
    "uuid": UUID(int=1),
    "moment": datetime(2026, 1, 2, tzinfo=UTC),
    "day": date(2026, 1, 2),
    "address": "127.0.0.1",
    "price": Decimal("0.10"),
    "kind": "b",
    "counts": {"x": 1},
    "tree": {"of": [{}]},
    "class_": True,
    "place_x": 2,
    "Struct": "s",
}
MISTAKES = """
from outbox.dbapi import Event
from payloads import OrderPaidV1, OrderPlacedV2

Event.of(OrderPaidV1(id="a", number=1))
Event.of(OrderPlacedV2(id="a", number=1))
Event.of(OrderPlacedV2(id="a", number=1, lable="b"))
Event.of(OrderPlacedV2(id="a", number=1, label=2))
Event.of({"id": "a", "number": 1, "label": "b"})
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "connect" / "events").mkdir(parents=True)
    return Project(tmp_path, payloads="payloads.py")


@pytest.fixture
def events(project: Project) -> Events:
    label = {"label": {"type": "string"}}
    return Events(project.events).aggregate(
        "order", placed_v1=payload(), placed_v2=payload(label, ("label",)), paid_v1=payload(label)
    )


@pytest.fixture
def module(project: Project, monkeypatch: pytest.MonkeyPatch) -> Callable[[Events], ModuleType]:
    def written(events: Events) -> ModuleType:
        made = ModuleType("written_payloads")
        monkeypatch.setitem(sys.modules, made.__name__, made)
        exec(payloads.write(project, events.load()).read_text(), vars(made))  # noqa: S102 - the generated module
        return made

    return written


def rules(project: Project, events: Events) -> list[str]:
    return [finding.rule for finding in payloads.check(project, events.load())]


def test_values_of_every_type_are_written_under_the_names_of_the_schema(
    events: Events, module: Callable[[Events], ModuleType]
) -> None:
    schema = payload(PROPERTIES, ("items", "uuid"), **{"$defs": {"node": NODE}})
    written = module(events.write("common.schema.json", COMMON).aggregate("order", moved_v1=schema))
    made = written.OrderMovedV1(**VALUES, items=[written.Item(product="A")])
    sent = as_json(made)
    assert {*sent} == {*PROPERTIES, "id", "number"}
    assert sent["price"] == Decimal("0.10")
    assert sent["items"] == [{"product": "A"}]
    assert events.load().schema("order", "moved", 1).violation(sent) is None
    least = as_json(written.OrderMovedV1(id="a", number=1, uuid=UUID(int=1), items=[]))
    assert {*least} == {"id", "number", "uuid", "items"}


def test_a_class_is_one_version_of_one_event(
    project: Project, events: Events, module: Callable[[Events], ModuleType]
) -> None:
    keyed = {"type": "object", "required": ["item-id"], "properties": {"item-id": PROPERTIES["uuid"]}}
    events.aggregate("item", 'key = "item-id"', made_v1=keyed, taken_v1=keyed, lost_v1={**keyed, "deprecated": True})
    written = module(events)
    first = Event.of(written.OrderPlacedV1(id="a", number=1), traceparent="t")
    assert first == Event("order", "a", "placed", first.payload, 1, "t")
    assert Event.of(written.OrderPlacedV2(id="a", number=1, label="")).schema_version == 2
    assert Event.of(written.ItemMadeV1(item_id=UUID(int=1))).aggregateid == str(UUID(int=1))
    assert written.ItemMadeV1 is not written.ItemTakenV1, "though their properties are equal"
    assert "ItemLost" not in payloads.file(project).read_text(), "it is deprecated"


class TestStale:
    def test_an_edited_schema(self, project: Project, events: Events) -> None:
        text = payloads.write(project, events.load()).read_text()
        assert rules(project, events) == []
        assert payloads.write(project, events.load()).read_text() == text
        events.aggregate("order", paid_v1=payload({"label": {"type": "string", "maxLength": 9}}))
        assert rules(project, events) == [], "a bound changes no type"
        events.aggregate("order", paid_v1=payload({"note": {"type": "string"}}))
        assert rules(project, events) == ["payloads-stale"]
        target = payloads.write(project, events.load())
        assert rules(project, events) == []
        target.write_text(target.read_text().replace("label: str", "label: int"))
        assert rules(project, events) == ["payloads-stale"]
        payloads.write(project, events.load())
        shutil.rmtree(events.folder / "order")
        assert rules(project, events) == ["payloads-stale"]
        assert "class" not in payloads.write(project, events.load()).read_text()
        assert rules(project, events) == []

    def test_a_module_that_is_not_generated_is_kept(self, project: Project, events: Events) -> None:
        assert rules(project, events) == [], "a project may have none"
        payloads.file(project).write_text("PAYLOADS = 1\n")
        assert rules(project, events) == []
        with raises("payloads-not-generated"):
            payloads.write(project, events.load())
        assert payloads.file(project).read_text() == "PAYLOADS = 1\n"
        with raises("payloads-folder-missing"):
            payloads.write(replace(project, payloads="none/payloads.py"), events.load())
        with raises("payloads-unusable", "OrderLineAddedV1"):
            events.aggregate("order-line", added_v1=payload()).aggregate("order", line_added_v1=payload())
            payloads.write(replace(project, payloads="two.py"), events.load())


def test_mypy_finds_a_missing_a_misspelt_and_a_mistyped_property(project: Project, events: Events) -> None:
    payloads.write(project, events.load())
    (project.root / "mistakes.py").write_text(MISTAKES)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context", "mistakes.py"]
    done = subprocess.run(
        [*command, "--cache-dir", str(ROOT / ".mypy_cache" / "payloads")],
        cwd=project.root,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line.split(":")[1] for line in done.stdout.splitlines() if ": error: " in line]
    assert found == ["6", "7", "8", "9"], done.stdout + done.stderr
