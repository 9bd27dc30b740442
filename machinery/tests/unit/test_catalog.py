"""The catalog: what a folder of events declares, and which declarations are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outbox.base import project
from outbox.base.settings import load
from outbox.events import catalog
from outbox_lab.testing.failures import raises
from tests.support.declared import NUMBER, TOML, Events, payload

TEXT = {"type": "string"}
FLAG = {"type": "boolean"}
KEY = 'key = "id"\n'


@pytest.fixture
def events(tmp_path: Path) -> Events:
    return Events(tmp_path / "events")


def test_folder_declares_aggregates_and_events(events: Events) -> None:
    events.aggregate("order", placed_v1=payload(), placed_v2=payload(), paid_v1=payload(deprecated=True))
    events.aggregate("item", 'key = "id"\ntopic = "stock"\npartitions = 2\nsource = "items"\n', moved_v1=payload())
    found = events.load()
    order, item = found.aggregates["order"], found.aggregates["item"]
    assert (order.topic, order.key, order.version, order.partitions) == ("shop.order", "id", "number", 4)
    assert (item.topic, item.version, item.partitions, item.source) == ("stock", None, 2, "items")
    assert {name: list(versions) for name, versions in order.events.items()} == {"placed": [1, 2], "paid": [1]}
    assert [schema.name for schema in found.schemas if schema.is_deprecated] == ["order.paid.v1"]
    assert found.schema("order", "placed", 2).event == "order.placed"
    assert {topic: [one.name for one in of] for topic, of in found.topics.items()} == {
        "shop.order": ["order"],
        "stock": ["item"],
    }


def test_no_folder_declares_nothing(events: Events) -> None:
    assert events.load().aggregates == {}


def test_folders_of_editors_and_python_are_ignored(events: Events) -> None:
    events.write(".idea/x.json", {}).write("__pycache__/x.json", {}).write("notes/README.md", "text")
    assert events.load().aggregates == {}


def test_undeclared_event_is_reported(events: Events) -> None:
    found = events.aggregate("order", placed_v1=payload()).load()
    for name in (("order", "placed", 2), ("order", "paid", 1), ("item", "placed", 1)):
        with raises("event-undeclared"):
            found.schema(*name)


class TestHostileDeclarations:
    @pytest.mark.parametrize(
        "names",
        [
            ("Placed.v1.schema.json", "placed.v1.schema.json"),
            ("Placed.v1.schema.json", "placed.v2.schema.json"),
            ("taken.back.v1.schema.json", "taken_back.v1.schema.json"),
            ("taken-back.v1.schema.json", "taken.back.v2.schema.json"),
        ],
    )
    def test_two_spellings_of_one_event(self, events: Events, names: tuple[str, str]) -> None:
        events.aggregate("order")
        for name in names:
            events.write(f"order/{name}", payload())
        with raises("event-declaration-unusable", "are one event"):
            events.load()

    def test_two_spellings_of_one_aggregate(self, events: Events) -> None:
        events.aggregate("order", placed_v1=payload()).aggregate("Order", paid_v1=payload())
        with raises("event-declaration-unusable", "differs in case only"):
            events.load()

    @pytest.mark.parametrize(
        "name",
        [
            "placed.v01.schema.json",
            "placed.v0.schema.json",
            "placed.V1.schema.json",
            "placed.schema.json",
            "placed.v1.json",
            "placed.v10000.schema.json",
            "placed.v1.v2.schema.json",
            "2placed.v1.schema.json",
            ".v1.schema.json",
            "pläced.v1.schema.json",
            f"{'x' * 101}.v1.schema.json",
        ],
    )
    def test_file_name_that_declares_no_event(self, events: Events, name: str) -> None:
        events.aggregate("order", placed_v2=payload()).write(f"order/{name}", payload())
        with raises("event-declaration-unusable"):
            events.load()

    @pytest.mark.parametrize("name", ["order.line", "1order", "or der", "ördér", "-order", "x" * 101])
    def test_folder_name_that_is_no_aggregate_type(self, events: Events, name: str) -> None:
        events.aggregate(name, placed_v1=payload())
        with raises("event-declaration-unusable"):
            events.load()

    @pytest.mark.parametrize(
        "toml",
        [
            "",
            'version = "number"\n',
            "key = 1\n",
            'key = ""\n',
            'key = "id"\nversion = true\n',
            'key = "id"\nversion = "id"\n',
            'key = "id"\nkeys = "id"\n',
            'key = "id"\npartitions = "4"\n',
            'key = "id"\npartitions = true\n',
            'key = "id"\npartitions = 0\n',
            'key = "id"\npublished = "no"\n',
            'key = "id"\npublished = 0\n',
            'key = "id"\ntopic = "a b"\n',
            'key = "id"\ntopic = ".."\n',
            f'key = "id"\ntopic = "{"x" * 250}"\n',
            'key = "id"\n[topic]\n',
            'key = "id\n',
            'key = "id"\nkey = "id"\n',
        ],
    )
    def test_aggregate_file_that_is_wrong(self, events: Events, toml: str) -> None:
        events.aggregate("order", toml, placed_v1=payload())
        with raises("event-declaration-unusable"):
            events.load()

    def test_prefix_that_makes_a_topic_too_long_is_named(self, events: Events) -> None:
        events.aggregate("order", placed_v1=payload())
        with raises("event-declaration-unusable", "at most 249", "`topic-prefix`"):
            catalog.load(events.folder, "x" * 244)

    def test_aggregate_file_that_is_missing_or_no_text(self, events: Events) -> None:
        events.write("order/placed.v1.schema.json", payload())
        with raises("event-declaration-unusable"):
            events.load()
        (events.folder / "order" / "aggregate.toml").write_bytes(b'key = "\xff"')
        with raises("event-declaration-unusable"):
            events.load()

    def test_aggregate_without_events(self, events: Events) -> None:
        with raises("event-declaration-unusable"):
            events.aggregate("order").load()

    @pytest.mark.parametrize(
        "schema",
        [
            {"properties": {"number": NUMBER}, "required": ["number"]},
            {"properties": {"id": TEXT, "number": NUMBER}, "required": ["number"]},
            payload({"id": {"type": ["string", "null"]}}),
            payload({"id": {"type": "object"}}),
            payload({"id": {"type": "number"}}),
            payload({"id": {"type": "integer"}}),
            {"properties": {"id": TEXT}, "required": ["id"]},
            {"properties": {"id": TEXT, "number": NUMBER}, "required": ["id"]},
            payload({"number": {"type": "integer", "minimum": 1}}),
            payload({"number": {**NUMBER, "type": ["integer", "null"]}}),
            payload({"number": TEXT}),
            payload({"id": {"type": "string", "format": "uuid"}}),
            payload({"note": TEXT, "Note": TEXT}),
        ],
    )
    def test_event_with_other_keys_or_columns_than_it_can_have(self, events: Events, schema: dict[str, Any]) -> None:
        events.aggregate("order", placed_v1=payload(), paid_v1=schema)
        with raises("event-declaration-unusable"):
            events.load()

    @pytest.mark.parametrize(
        "name",
        [
            *sorted({*catalog.RESERVED, *catalog.SYSTEM}),
            *("Offset", "", "a\0b", 'a"b', "pieces:numeric", "50%", "x" * 52),
        ],
    )
    def test_property_that_cannot_be_a_column(self, events: Events, name: str) -> None:
        events.aggregate("order", placed_v1=payload({name: TEXT}))
        with raises("event-declaration-unusable"):
            events.load()

    @pytest.mark.parametrize(
        ("rule", "count"), [(TEXT, 318), (FLAG, 956), ({"type": "string", "format": "uuid"}, 478), ({}, 318)]
    )
    def test_properties_that_no_row_has_room_for(self, events: Events, rule: dict[str, Any], count: int) -> None:
        """Beside the key, a text, and the version, a bigint."""
        events.aggregate("order", placed_v1=payload({f"p{number}": rule for number in range(count)}))
        events.load()
        events.aggregate("order", placed_v1=payload({f"p{number}": rule for number in range(count + 1)}))
        with raises("event-declaration-unusable", "a row has room for 7680 bytes"):
            events.load()

    @pytest.mark.parametrize(
        "schema",
        [
            {},
            {"type": "object"},
            {"type": "array", "items": TEXT},
            {"type": ["object", "null"], "properties": {"id": TEXT}},
            {"properties": []},
            {"properties": {"id": {"type": "word"}}},
            {"properties": {"id": {"pattern": "("}}},
            {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"id": TEXT}},
            [],
            "{",
            "",
            '{"properties": {"id": {}, "id": {"type": "string"}}}',
            '{"properties": {"id": {"maximum": NaN}}}',
            '{"properties": ' * 101 + "{}" + "}" * 101,
            '{"properties": ' * 100_000 + "{}" + "}" * 100_000,
        ],
        ids=lambda schema: str(schema)[:60],
    )
    def test_schema_that_cannot_be_used(self, events: Events, schema: object) -> None:
        events.aggregate("order", placed_v1=schema)
        with raises("schema-unusable"):
            events.load()

    def test_schema_that_is_no_text(self, events: Events) -> None:
        events.aggregate("order", placed_v1="")
        (events.folder / "order" / "placed.v1.schema.json").write_bytes(b"\xff\xfe\xfd")
        with raises("schema-unusable"):
            events.load()

    def test_event_outside_of_an_aggregate(self, events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
        events.write("order-event.v1.schema.json", payload())
        ours = project.Project(root=events.folder.parent, folders={"events": events.folder})
        monkeypatch.setattr(project, "current", lambda: ours)
        with raises("event-declaration-unusable"):
            catalog.of_project(load(environment=False))


class TestTopics:
    def test_aggregates_may_share_one(self, events: Events) -> None:
        events.aggregate("order", f'{TOML}topic = "sales"\n', placed_v1=payload())
        events.aggregate("refund", f'{TOML}topic = "sales"\n', paid_v1=payload())
        assert [one.name for one in events.load().topics["sales"]] == ["order", "refund"]

    @pytest.mark.parametrize("toml", [KEY, 'key = "other"\nversion = "number"\n', f"{TOML}partitions = 9\n"])
    def test_those_that_share_one_are_ordered_alike(self, events: Events, toml: str) -> None:
        events.aggregate("order", f'{TOML}topic = "sales"\n', placed_v1=payload())
        events.aggregate("refund", f'{toml}topic = "sales"\n', paid_v1=payload({"other": TEXT}, ("other",)))
        with raises("event-declaration-unusable", "differ in key, version or partitions"):
            events.load()

    def test_type_occurs_once_on_one(self, events: Events) -> None:
        events.aggregate("order", f'{TOML}topic = "sales"\n', paid_v1=payload())
        events.aggregate("refund", f'{TOML}topic = "sales"\n', paid_v2=payload())
        with raises("event-declaration-unusable", "two events called paid"):
            events.load()


class TestWanted:
    @pytest.fixture
    def found(self, events: Events) -> catalog.Catalog:
        events.aggregate("order", placed_v1=payload(), placed_v2=payload(), paid_v1=payload(), paid_v2=payload())
        events.write("order/upcast.py", "def placed_v1(payload):\n    return payload\n")
        return events.aggregate("item", moved_v1=payload()).load()

    def test_event_stands_for_all_its_versions(self, found: catalog.Catalog) -> None:
        [one] = found.wanted(["order.placed"])
        assert (one.name, one.schema.name) == ("order.placed", "order.placed.v2")
        assert sorted(one.accepts) == [1, 2]
        assert not one.by_aggregate
        assert not one.by_version

    def test_aggregate_stands_for_all_its_events(self, found: catalog.Catalog) -> None:
        [one] = found.wanted(["item"])
        assert (one.name, one.by_aggregate, one.by_version) == ("item.moved", True, False)

    def test_version_stands_for_itself(self, found: catalog.Catalog) -> None:
        first, second = found.wanted(["order.paid.v1", "order.paid.v2"])
        assert (first.name, list(first.accepts), first.by_version) == ("order.paid.v1", [1], True)
        assert (second.name, list(second.accepts), second.by_aggregate) == ("order.paid.v2", [2], False)

    @pytest.mark.parametrize("name", ["", "order.lost", "order.placed.v3", "order.placed.v01", "Order", "order."])
    def test_unknown_name_is_reported(self, found: catalog.Catalog, name: str) -> None:
        with raises("event-undeclared"):
            found.wanted([name])

    @pytest.mark.parametrize(
        "names",
        [
            ("item", "item"),
            ("item", "item.moved"),
            ("item.moved", "item.moved.v1"),
            ("order.placed.v1", "order.placed"),
        ],
    )
    def test_overlapping_names_are_refused(self, found: catalog.Catalog, names: tuple[str, str]) -> None:
        with raises("events-overlap"):
            found.wanted(names)

    def test_missing_upcaster_is_reported(self, found: catalog.Catalog) -> None:
        with raises("upcaster-missing"):
            found.wanted(["order"])
