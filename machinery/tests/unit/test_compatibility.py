"""Declared events: what a folder of them declares, references between its files, which declarations are refused; which
edits of a published event are compatible, and that those are: no payload, column or reader is lost.
"""

from __future__ import annotations

import copy
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.events import catalog
from outbox.events.catalog import Catalog
from outbox.events.schema import EventSchema
from outbox.events.values import convert
from outbox_lab.events.compatibility import compare, compare_schemas
from outbox_lab.events.expansion import expanded
from outbox_lab.testing.failures import raises
from tests.support.declared import NUMBER, TOML, Events, payload
from tests.support.made_schemas import DOCUMENTS, ENUM, NAMES, NUMBERS, RULES, SIZES, value

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


# Edits --------------------------------------------------------------------------------------------------------------

BIGINT = {"type": "integer", "minimum": 0, "maximum": 100}


def edit(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    """The rules that an edit breaks, each with its property."""
    old, new = (EventSchema("order", "placed", 1, one) for one in (before, after))
    return sorted((finding.rule, finding.property) for finding in compare_schemas(old, new))


def of(rule: Any, defs: Any = None, *, required: bool = True, **more: Any) -> dict[str, Any]:
    return payload({"it": rule}, ("it",) if required else (), **more, **({"$defs": defs} if defs else {}))


def nested(rule: Any) -> dict[str, Any]:
    lines = {"type": "array", "items": {"type": "object", "properties": {"it": rule}, "required": ["it"]}}
    return payload({"lines": lines}, ("lines",))


ANNOTATED = {"title": "t", "description": "d", "examples": ["x"], "$comment": "c", "default": "x", "x-owner": "me"}
COMPATIBLE: list[tuple[Any, Any]] = [
    (TEXT, TEXT | ANNOTATED),
    (TEXT, {"$ref": "#/$defs/text"}),
    ({"$ref": "#/$defs/text"}, {"$ref": "#/$defs/other", "description": "d"}),
    ({"$ref": "#/$defs/text", "maxLength": 3}, {"maxLength": 4, "type": "string"}),
    ({"type": ["string", "null"]}, {"type": ["null", "string"]}),
    (BIGINT, BIGINT | {"minimum": -1, "maximum": 101}),
    ({"type": "number", "exclusiveMaximum": 9}, {"type": "number", "exclusiveMaximum": 9.5}),
    (TEXT | {"minLength": 2, "maxLength": 5}, TEXT | {"minLength": 1, "maxLength": 6}),
    (TEXT | {"pattern": "^a", "maxLength": 5}, TEXT | {"pattern": "^a", "maxLength": 6}),
    ({"enum": ["a"]}, {"enum": ["b", "a"]}),
    ({"properties": {"old": TEXT}}, {"properties": {"old": TEXT, "new": TEXT}}),
    ({"anyOf": [TEXT | {"maxLength": 2}, BIGINT]}, {"anyOf": [TEXT | {"maxLength": 3}, BIGINT]}),
    ({"type": "object", "patternProperties": {"^x": TEXT}}, {"type": "object", "patternProperties": {"^x": TEXT}}),
]
INCOMPATIBLE: list[tuple[Any, Any, str]] = [
    (TEXT, {"type": "boolean"}, "type-changed"),
    (TEXT, {"type": ["string", "null"]}, "type-changed"),
    (TEXT, {}, "type-changed"),
    ({}, TEXT, "type-changed"),
    (BIGINT, BIGINT | {"minimum": 1}, "bound-narrowed"),
    (BIGINT, BIGINT | {"exclusiveMaximum": 100}, "bound-narrowed"),
    ({"type": "array"}, {"type": "array", "maxItems": 9}, "bound-narrowed"),
    (TEXT | {"pattern": "^a"}, TEXT | {"pattern": "^[ab]"}, "keyword-changed"),
    ({"type": "number", "multipleOf": 2}, {"type": "number", "multipleOf": 1}, "keyword-changed"),
    ({"enum": ["a", "b"]}, {"enum": ["a"]}, "value-removed"),
    ({"enum": [1]}, {"enum": [True]}, "value-removed"),
    ({"enum": ["a"]}, {"enum": ["a", None]}, "type-changed"),
    (TEXT | {"enum": ["a"]}, TEXT, "keyword-changed"),
    ({"const": "a"}, {"enum": ["b", "a"]}, "keyword-changed"),
    ({"not": {"const": 0}}, {}, "keyword-changed"),
    ({"anyOf": [TEXT]}, {"anyOf": [TEXT, BIGINT]}, "keyword-changed"),
    ({"type": "array"}, {"type": "array", "items": TEXT}, "keyword-changed"),
]
CHANGED = ("keyword-changed", "")
DEFS = {"text": TEXT, "other": {"$ref": "#/$defs/text"}}


@pytest.mark.parametrize(("before", "after"), COMPATIBLE)
@pytest.mark.parametrize("place", [of, nested])
def test_compatible_edit_has_no_finding(place: Any, before: Any, after: Any) -> None:
    assert edit({**place(before), "$defs": DEFS}, {**place(after), "$defs": DEFS}) == []


@pytest.mark.parametrize(("before", "after", "rule"), INCOMPATIBLE)
@pytest.mark.parametrize(("place", "path"), [(of, "it"), (nested, "lines[].it")])
def test_incompatible_edit_names_rule_and_property(place: Any, path: str, before: Any, after: Any, rule: str) -> None:
    assert (rule, path) in edit(place(before), place(after))


def tree(rule: Any) -> dict[str, Any]:
    """A rule that refers to itself."""
    more = {"items": {"$ref": "#/$defs/node"}}
    return of({"$ref": "#/$defs/node"}, {"node": {"properties": {"name": rule, "more": more}}})


def multiplied(rule: Any) -> dict[str, Any]:
    """References that multiply."""
    below = [{"$ref": f"#/$defs/d{number + 1}"} for number in range(40)]
    every = {f"d{number}": {"properties": {"a": one, "b": one}} for number, one in enumerate(below)}
    return of({"$ref": "#/$defs/d0"}, {**every, "d40": rule})


OPTIONAL = of(TEXT, required=False)
CLOSED = ({"additionalProperties": False}, {"additionalProperties": TEXT}, {"patternProperties": {"^i": TEXT}})
NOT_ALLOWED = [("property-not-allowed", "it")]
LONGER = {"type": "integer", "minimum": 0}
ANY: dict[str, Any] = {"type": "object"}


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (payload(), OPTIONAL, []),
        (payload(), of(TEXT), [("required-changed", "it")]),
        (payload(), payload(allOf=[{"required": ["it"]}, OPTIONAL]), [CHANGED, ("required-changed", "it")]),
        *((payload(**closed), {**OPTIONAL, **closed}, NOT_ALLOWED) for closed in CLOSED),
        (payload(required=("it",)), of(TEXT), [*NOT_ALLOWED, ("required-changed", "it")]),  # any content was valid
        (of(ANY), of(ANY | {"properties": {"new": TEXT}}), [("property-not-allowed", "it.new")]),
        (OPTIONAL, payload(), [("property-removed", "it")]),
        (of(TEXT), OPTIONAL, [("column-changed", "it"), ("required-changed", "it")]),
        (of(BIGINT), of(LONGER), [("column-changed", "it")]),
        (nested(BIGINT), nested(LONGER), []),
        (tree(TEXT | {"maxLength": 2}), tree(TEXT), [("not-comparable", "")]),
        (tree(TEXT), tree(TEXT | ANNOTATED), []),
        (multiplied(TEXT), multiplied(BIGINT), [("not-comparable", "")]),
        # They depend on everything.
        (of(TEXT | {"maxLength": 2}, unevaluatedProperties=False), of(TEXT, unevaluatedProperties=False), [CHANGED]),
    ],
)
def test_edit_of_properties_and_references(
    before: dict[str, Any], after: dict[str, Any], found: list[tuple[str, str]]
) -> None:
    assert edit(before, after) == found


class TestCatalogs:
    @pytest.fixture
    def events(self, tmp_path: Path) -> Events:
        common = {"$defs": {"text": TEXT | {"maxLength": 9}}}
        order = of({"$ref": "../common.schema.json#/$defs/text"})
        events = Events(tmp_path / "events").write("common.schema.json", common)
        events.aggregate("order", placed_v1=order, paid_v1=payload(), lost_v1=payload(deprecated=True))
        events.aggregate("gone", left_v1=payload(deprecated=True))
        return events.aggregate("item", moved_v1=order)

    @staticmethod
    def found(before: Catalog, after: Events) -> list[tuple[str, str, str]]:
        return [(one.rule, one.file, one.property) for one in compare(before, after.load())]

    def test_what_is_new_or_only_written_otherwise_is_compatible(self, tmp_path: Path, events: Events) -> None:
        assert self.found(Events(tmp_path / "none").load(), events) == []
        before = events.load()
        events.aggregate("order", placed_v2=payload(), sent_v1=payload()).aggregate("refund", paid_v1=payload())
        events.aggregate("item", f'{TOML}topic = "shop.item"\npartitions = 4\nsource = "items"\n')
        events.write("common.schema.json", {"$defs": {"text": TEXT}})
        assert self.found(before, events) == []

    def test_edit_of_a_shared_definition_counts_for_each_event(self, events: Events) -> None:
        before = events.load()
        events.write("common.schema.json", {"$defs": {"text": TEXT | {"maxLength": 8}, "more": BIGINT}})
        assert self.found(before, events) == [
            ("bound-narrowed", "item/moved.v1.schema.json", "it"),
            ("bound-narrowed", "order/placed.v1.schema.json", "it"),
        ]

    def test_version_is_removed_only_after_it_was_deprecated(self, events: Events) -> None:
        before = events.load()
        for name in ("paid", "lost"):
            (events.folder / "order" / f"{name}.v1.schema.json").unlink()
        for name in ("gone", "item"):
            shutil.rmtree(events.folder / name)
        assert self.found(before, events) == [
            ("aggregate-removed", "item/aggregate.toml", ""),
            ("version-removed", "order/paid.v1.schema.json", ""),
        ]

    def test_deprecation_is_compatible_and_its_end_is_not(self, events: Events) -> None:
        before = events.load()
        events.aggregate("order", paid_v1=payload(deprecated=True))
        assert self.found(before, events) == []
        events.aggregate("order", lost_v1=payload())
        assert self.found(before, events) == [("deprecation-withdrawn", "order/lost.v1.schema.json", "")]

    @pytest.mark.parametrize(
        ("toml", "rule"),
        [
            ('key = "it"\nversion = "number"\n', "key-changed"),
            ('key = "id"\n', "version-changed"),
            (f'{TOML}topic = "elsewhere"\n', "topic-changed"),
            (f"{TOML}partitions = 5\n", "partitions-changed"),
        ],
    )
    def test_what_orders_or_routes_the_events_stays(self, events: Events, toml: str, rule: str) -> None:
        before = events.load()
        events.aggregate("item", toml)
        assert self.found(before, events) == [(rule, "item/aggregate.toml", rule.partition("-")[0])]


# Any edit: those that are called compatible must be.

ADDED: list[dict[str, Any]] = [
    *({"maxLength": 1}, {"minLength": 1}, {"pattern": "^x"}, {"format": "uuid"}, {"format": "email"}),
    *({"minimum": 0}, {"exclusiveMaximum": 1}, {"multipleOf": 2}, {"minimum": -9, "maximum": 9}, {"type": "integer"}),
    *({"minItems": 1}, {"maxItems": 1}, {"uniqueItems": True}, {"items": {"type": "string"}}),
    *({"additionalProperties": False}, {"additionalProperties": {"type": "string"}}),
]


def places(node: Any) -> list[dict[str, Any]]:
    """Every object in a schema, keyword or map."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return ([node] if isinstance(node, dict) else []) + [found for child in children for found in places(child)]


LIMITING = {
    *("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"),
    *("minLength", "maxLength", "minItems", "maxItems"),
}
CONTENTS: list[st.SearchStrategy[Any]] = [RULES, NUMBERS, SIZES, ENUM, st.booleans()]


KINDS = ["move", "move", "remove", "put", "add", "enum", "property"]


def edited(data: st.DataObject, document: dict[str, Any]) -> dict[str, Any]:
    """The document after one edit or two."""
    made = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from([one for one in places(made) if one]))
        with suppress(TypeError, AttributeError):  # a property may be called like a keyword
            change(data, data.draw(st.sampled_from(KINDS)), place)
        made = copy.deepcopy(made)  # parts that were drawn may be drawn again
    return made


def change(data: st.DataObject, kind: str, place: dict[str, Any]) -> None:
    """One edit in one object of a schema."""
    if kind == "move":
        for name in place.keys() & LIMITING:
            place[name] += data.draw(st.sampled_from([-1, 1]))
    elif kind == "remove":
        del place[data.draw(st.sampled_from(sorted(place)))]
    elif kind == "put":
        place[data.draw(st.sampled_from(sorted(place)))] = copy.deepcopy(data.draw(st.one_of(CONTENTS)))
    elif kind == "add":
        place.update(copy.deepcopy(data.draw(st.sampled_from(ADDED))))
    elif kind == "enum" and "enum" in place:
        place["enum"] = data.draw(st.permutations([*place["enum"], *data.draw(ENUM)]))[:3]
    elif kind == "property" and "properties" in place:
        place["properties"][data.draw(st.sampled_from([*NAMES, "d"]))] = copy.deepcopy(data.draw(RULES))


def schema(document: dict[str, Any]) -> EventSchema | None:
    """The schema of a document; None if it cannot be used."""
    try:
        return EventSchema("order", "placed", 1, document)
    except Failure:
        return None


def columns(of_version: EventSchema, value: dict[str, Any]) -> dict[str, Any]:
    """A payload as the columns of a version; the problem where there is one."""
    found: dict[str, Any] = {}
    for column in of_version.columns:
        try:
            found[column.name] = (column.type, convert(column.type, value.get(column.name)))
        except ValueError as error:
            found[column.name] = (column.type, str(error))
    return found


@given(DOCUMENTS, st.data())
@hypothesis.settings(
    max_examples=250,
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_compatible_edit_keeps_every_payload_and_column(document: dict[str, Any], data: st.DataObject) -> None:
    before, after = schema(document), schema(edited(data, document))
    if before is None or after is None or compare_schemas(before, after):
        return
    tree = expanded(before.document)
    for _ in range(8):
        found = value(data, [tree])
        if before.violation(found) is None:
            assert after.violation(found) is None
            assert columns(before, found).items() <= columns(after, found).items()
