"""The catalog: what a folder of events declares, references between its files, and which declarations are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outbox.base import project
from outbox.base.settings import load
from outbox.events import catalog
from outbox.events.schema import EventSchema
from outbox_lab.testing.failures import raises
from tests.support.declared import NUMBER, TOML, Events, payload

TEXT = {"type": "string"}
FLAG = {"type": "boolean"}
UUID = {"type": "string", "format": "uuid"}
KEY = 'key = "id"\n'
PLACED = "order/placed.v1.schema.json"


@pytest.fixture
def events(tmp_path: Path) -> Events:
    return Events(tmp_path / "events")


def test_folder_declares_aggregates_and_events(events: Events) -> None:
    assert events.load().aggregates == {}, "there is no folder"
    events.aggregate("order", placed_v1=payload(), placed_v2=payload(), paid_v1=payload(deprecated=True))
    events.aggregate("item", f'{KEY}topic = "stock"\npartitions = 2\nsource = "items"\n', moved_v1=payload())
    # What editors and Python leave there.
    events.write(".idea/x.json", {}).write("__pycache__/x.json", {}).write("notes/README.md", "text")
    found = events.load()
    order, item = found.aggregates["order"], found.aggregates["item"]
    assert (order.topic, order.key, order.version, order.partitions) == ("shop.order", "id", "number", 4)
    assert (item.topic, item.version, item.partitions, item.source) == ("stock", None, 2, "items")
    assert {name: list(versions) for name, versions in order.events.items()} == {"placed": [1, 2], "paid": [1]}
    assert [schema.name for schema in found.schemas if schema.is_deprecated] == ["order.paid.v1"]
    assert found.schema("order", "placed", 2).event == "order.placed"
    for name in (("order", "placed", 3), ("order", "sent", 1), ("refund", "placed", 1)):
        with raises("event-undeclared"):
            found.schema(*name)


# What cannot be used: by file, with the rest of a valid declaration -------------------------------------------------

FILE_NAMES = [
    *("placed.v01", "placed.v0", "placed.V1", "placed", "placed.v10000", "placed.v1.v2", "2placed.v1", ".v1"),
    *("pläced.v1", f"{'x' * 101}.v1"),
]
TWINS = [
    ("Placed.v1", "placed.v1"),
    ("Placed.v1", "placed.v2"),
    ("taken.back.v1", "taken_back.v1"),
]
AGGREGATE_TYPES = ["order.line", "1order", "or der", "ördér", "-order", "x" * 101, "Order"]
AGGREGATE_FILES = [
    *("", 'version = "number"\n', "key = 1\n", 'key = ""\n', 'key = "id\n', b'key = "\xff"'),
    *(f"{KEY}version = true\n", f'{KEY}version = "id"\n', f'{KEY}keys = "id"\n', f"{KEY}[topic]\n", KEY + KEY),
    *(f'{KEY}partitions = "4"\n', f"{KEY}partitions = true\n", f"{KEY}partitions = 0\n"),
    *(f'{KEY}topic = "a b"\n', f'{KEY}topic = ".."\n', f'{KEY}topic = "{"x" * 250}"\n'),
]
# With another key, version or columns than an event can have.
PAYLOADS: list[dict[str, Any]] = [
    {"properties": {"number": NUMBER}, "required": ["number"]},
    {"properties": {"id": TEXT, "number": NUMBER}, "required": ["number"]},
    payload({"id": {"type": ["string", "null"]}}),
    payload({"id": {"type": "object"}}),
    payload({"id": {"type": "integer"}}),
    payload({"id": UUID}),  # the key of the aggregate's other events is a text
    {"properties": {"id": TEXT, "number": NUMBER}, "required": ["id"]},
    payload({"number": {"type": "integer", "minimum": 1}}),
    payload({"number": {**NUMBER, "type": ["integer", "null"]}}),
    payload({"note": TEXT, "Note": TEXT}),
    *(payload({name: TEXT}) for name in sorted({*catalog.RESERVED, *catalog.SYSTEM})),
    *(payload({name: TEXT}) for name in ("Offset", "", "a\0b", 'a"b', "pieces:numeric", "50%", "x" * 52)),
]
SALES = 'topic = "sales"\n'
OTHER = payload({"other": TEXT}, ("other",))
UNUSABLE: list[dict[str, Any]] = [
    *({f"order/{name}.schema.json": payload()} for name in FILE_NAMES),
    {"order/placed.v1.json": payload()},
    *({f"order/{one}.schema.json": payload(), f"order/{other}.schema.json": payload()} for one, other in TWINS),
    *({f"{name}/aggregate.toml": TOML, f"{name}/placed.v1.schema.json": payload()} for name in AGGREGATE_TYPES),
    *({"order/aggregate.toml": content} for content in AGGREGATE_FILES),
    *({"order/paid.v1.schema.json": schema} for schema in PAYLOADS),
    {"refund/paid.v1.schema.json": payload()},  # without an aggregate.toml
    {"refund/aggregate.toml": TOML},  # without an event
    # What shares a topic is ordered alike, and has no type twice.
    *(
        {
            "order/aggregate.toml": TOML + SALES,
            "refund/aggregate.toml": toml + SALES,
            "refund/paid.v1.schema.json": OTHER,
        }
        for toml in (KEY, 'key = "other"\nversion = "number"\n', f"{TOML}partitions = 9\n")
    ),
    {
        "order/aggregate.toml": TOML + SALES,
        "refund/aggregate.toml": TOML + SALES,
        "refund/placed.v2.schema.json": OTHER,
    },
]


def declare(events: Events, files: dict[str, Any]) -> None:
    """A valid declaration with these files in place of its own; bytes are no text."""
    for name, content in ({"order/aggregate.toml": TOML, PLACED: payload()} | files).items():
        events.write(name, "" if isinstance(content, bytes) else content)
        if isinstance(content, bytes):
            (events.folder / name).write_bytes(content)


@pytest.mark.parametrize("files", UNUSABLE, ids=lambda files: str(files)[:80])
def test_declaration_that_cannot_be_used(events: Events, files: dict[str, Any]) -> None:
    declare(events, files)
    with raises("event-declaration-unusable"):
        events.load()


def test_prefix_that_makes_a_topic_too_long_is_named(events: Events) -> None:
    declare(events, {})
    with raises("event-declaration-unusable", "at most 249", "`topic-prefix`"):
        catalog.load(events.folder, "x" * 244)


def test_event_outside_of_an_aggregate(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    events.write("order-event.v1.schema.json", payload())
    ours = project.Project(root=events.folder.parent, folders={"events": events.folder})
    monkeypatch.setattr(project, "current", lambda: ours)
    with raises("event-declaration-unusable"):
        catalog.of_project(load(environment=False))


@pytest.mark.parametrize(("rule", "count"), [(TEXT, 318), (FLAG, 956), (UUID, 478), ({}, 318)])
def test_properties_that_no_row_has_room_for(events: Events, rule: dict[str, Any], count: int) -> None:
    """Beside the key, a text, and the version, a bigint."""
    declare(events, {PLACED: payload({f"p{number}": rule for number in range(count)})})
    events.load()
    declare(events, {PLACED: payload({f"p{number}": rule for number in range(count + 1)})})
    with raises("event-declaration-unusable", "a row has room for 7680 bytes"):
        events.load()


# References --------------------------------------------------------------------------------------------------------

COMMON = {"$id": "urn:common", "$defs": {"code": TEXT | {"pattern": "^[A-Z]$"}, "a/b~c %d": FLAG}}
SMALL = {"type": "integer", "minimum": 1, "maximum": 9}


def refer(reference: str, **more: Any) -> dict[str, Any]:
    return payload({"it": {"$ref": reference}}, ("it",), **more)


def schema_of(events: Events, files: dict[str, Any]) -> EventSchema:
    declare(events, files)
    return events.load().schema("order", "placed", 1)


@pytest.mark.parametrize(
    ("reference", "type_"),
    [
        ("../common.schema.json#/$defs/code", "text"),
        ("../common.schema.json#/$defs/a~1b~0c%20%25d", "boolean"),
        ("#/$defs/own", "bigint"),
        ("placed.v1.schema.json#/$defs/own", "bigint"),
        ("#/$defs/list/allOf/0", "bigint"),
        ("../far%20away.schema.json#/$defs/back", "text"),
        ("../far away.schema.json#/$defs/own", "bigint"),
    ],
)
def test_reference_is_resolved(events: Events, reference: str, type_: str) -> None:
    own = {"own": SMALL, "list": {"allOf": [SMALL]}}
    back = {"$ref": "common.schema.json#/$defs/code"}
    more = {"$defs": {"back": back, "own": {"$ref": "order/placed.v1.schema.json#/$defs/own"}}}
    files = {"common.schema.json": COMMON, "far away.schema.json": more}
    schema = schema_of(events, files | {PLACED: refer(reference, **{"$id": "urn:placed", "$defs": own})})
    assert [column.type for column in schema.columns] == ["text", "bigint", type_]
    wrong = schema.violation({"id": "a", "number": 1, "it": "no"})
    assert wrong is not None
    assert wrong.name == "it"
    right = {"text": "A", "bigint": 5, "boolean": True}[type_]
    assert schema.violation({"id": "a", "number": 1, "it": right}) is None


def test_allof_brings_properties_of_another_file(events: Events) -> None:
    placed = {"allOf": [{"$ref": "../base.schema.json"}], "properties": {"note": TEXT}}
    schema = schema_of(events, {"base.schema.json": payload(), PLACED: placed})
    assert [(column.name, column.is_nullable) for column in schema.columns] == [
        ("note", True),
        ("id", False),
        ("number", False),
    ]
    assert schema.violation({"note": "x"}) is not None


def test_tree_may_refer_to_itself(events: Events) -> None:
    node = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
    schema = schema_of(events, {PLACED: refer("#/$defs/node", **{"$defs": {"node": node}})})
    example = {"id": "a", "number": 1}
    assert schema.violation({**example, "it": {"children": [{"children": []}]}}) is None
    assert schema.violation({**example, "it": {"children": [{"children": 1}]}}) is not None


REFERENCES = [
    *("missing.schema.json", "../common.schema.json#/$defs/missing", "../common.schema.json#/$defs/code/pattern/deep"),
    *("#/allOf/3", "#code", "../../outside.schema.json", "/etc/hostname", "https://example.com/common.schema.json"),
    *("file:///etc/hostname", "urn:common", "..%2F..%2Foutside.schema.json", "..", "../link.schema.json"),
]
CIRCLES: list[dict[str, Any]] = [
    {PLACED: {"$ref": "#"}},
    {PLACED: refer("#/$defs/a", **{"$defs": {"a": {"$ref": "#/$defs/a"}}})},
    {PLACED: {"allOf": [{"$ref": "#"}]}},
    {PLACED: {"$ref": "../common.schema.json"}, "common.schema.json": {"$ref": "order/placed.v1.schema.json"}},
]
SCHEMAS: list[Any] = [
    *({}, {"type": "object"}, {"type": "array", "items": TEXT}, {"properties": []}, [], "{", "", b"\xff\xfe\xfd"),
    {"type": ["object", "null"], "properties": {"id": TEXT}},
    {"properties": {"id": {"pattern": "("}}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"id": TEXT}},
    '{"properties": {"id": {}, "id": {"type": "string"}}}',
    '{"properties": {"id": {"maximum": NaN}}}',
    '{"properties": ' * 101 + "{}" + "}" * 101,
    '{"properties": ' * 100_000 + "{}" + "}" * 100_000,
    *map(refer, REFERENCES),
    *(payload({"it": {keyword: "word"}}) for keyword in ("$id", "$anchor", "$dynamicRef", "$dynamicAnchor")),
]


@pytest.mark.parametrize(
    "files", [*({PLACED: schema} for schema in SCHEMAS), *CIRCLES], ids=lambda files: str(files)[33:110]
)
def test_schema_that_cannot_be_used(events: Events, files: dict[str, Any]) -> None:
    declare(events, {"common.schema.json": COMMON} | files)
    outside = events.folder.parent / "outside.schema.json"
    outside.write_text('{"type": "string"}')
    (events.folder / "link.schema.json").symlink_to(outside)
    with raises("schema-unusable"):
        _ = [schema.columns for schema in events.load().schemas]


# What a reader asks for --------------------------------------------------------------------------------------------


@pytest.fixture
def found(events: Events) -> catalog.Catalog:
    events.aggregate("order", placed_v1=payload(), placed_v2=payload(), paid_v1=payload(), paid_v2=payload())
    events.write("order/upcast.py", "def placed_v1(payload):\n    return payload\n")
    return events.aggregate("item", f'{TOML}topic = "shop.order"\n', moved_v1=payload()).load()


@pytest.mark.parametrize(
    ("name", "event", "versions", "by"),
    [
        ("order.placed", "order.placed", [1, 2], ""),
        ("item", "item.moved", [1], "aggregate"),
        ("order.paid.v1", "order.paid.v1", [1], "version"),
        ("order.paid.v2", "order.paid.v2", [2], "version"),
    ],
)
def test_name_stands_for_versions(found: catalog.Catalog, name: str, event: str, versions: list[int], by: str) -> None:
    [one] = found.wanted([name])
    assert (one.name, one.schema.version, sorted(one.accepts)) == (event, versions[-1], versions)
    assert (one.by_aggregate, one.by_version) == (by == "aggregate", by == "version")
    assert [aggregate.name for aggregate in found.topics["shop.order"]] == ["item", "order"]


@pytest.mark.parametrize(
    ("names", "code"),
    [
        *(([name], "event-undeclared") for name in ("", "order.lost", "order.placed.v3", "order.placed.v01", "order.")),
        *((["item", other], "events-overlap") for other in ("item", "item.moved")),
        (["item.moved", "item.moved.v1"], "events-overlap"),
        (["order.placed.v1", "order.placed"], "events-overlap"),
        (["order"], "upcaster-missing"),
    ],
)
def test_names_that_no_reader_can_ask_for_are_refused(found: catalog.Catalog, names: list[str], code: str) -> None:
    with raises(code):
        found.wanted(names)
