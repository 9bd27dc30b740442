"""Which edits of a published event are compatible, and that those are: no payload, column or reader is lost."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from outbox.base.errors import Failure
from outbox.events.schema import EventSchema
from outbox.events.values import convert
from outbox_lab.events import Finding
from outbox_lab.events.compatibility import compare, compare_schemas
from outbox_lab.events.expansion import expanded
from tests.support.declared import TOML, Events, payload
from tests.support.made_schemas import DOCUMENTS, ENUM, NAMES, NUMBERS, RULES, SIZES, value

TEXT = {"type": "string"}
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
    (TEXT | ANNOTATED, TEXT),
    (TEXT, {"$ref": "#/$defs/text"}),
    ({"$ref": "#/$defs/text"}, {"$ref": "#/$defs/other", "description": "d"}),
    ({"$ref": "#/$defs/text", "maxLength": 3}, {"maxLength": 4, "type": "string"}),
    ({"type": ["string", "null"]}, {"type": ["null", "string"]}),
    (BIGINT, BIGINT | {"minimum": -1, "maximum": 101}),
    ({"type": "integer", "minimum": 0}, {"type": "integer"}),
    ({"type": "number", "exclusiveMaximum": 9}, {"type": "number", "exclusiveMaximum": 9.5}),
    (TEXT | {"minLength": 2, "maxLength": 5}, TEXT | {"minLength": 1, "maxLength": 6}),
    (TEXT | {"minLength": 2, "maxLength": 5}, TEXT),
    (TEXT | {"pattern": "^a", "maxLength": 5}, TEXT | {"pattern": "^a", "maxLength": 6}),
    ({"type": "array", "minItems": 1, "maxItems": 2}, {"type": "array", "maxItems": 3}),
    ({"enum": ["a"]}, {"enum": ["b", "a"]}),
    ({"type": "object", "additionalProperties": False}, {"type": "object"}),
    ({"properties": {"old": TEXT}}, {"properties": {"old": TEXT, "new": TEXT}}),
    ({"anyOf": [TEXT | {"maxLength": 2}, BIGINT]}, {"anyOf": [TEXT | {"maxLength": 3}, BIGINT]}),
    ({"type": "object", "patternProperties": {"^x": TEXT}}, {"type": "object", "patternProperties": {"^x": TEXT}}),
]
INCOMPATIBLE: list[tuple[Any, Any, str]] = [
    (TEXT, {"type": "boolean"}, "type-changed"),
    (TEXT, {"type": ["string", "null"]}, "type-changed"),
    ({"type": ["string", "null"]}, TEXT, "type-changed"),
    (TEXT, {}, "type-changed"),
    ({}, TEXT, "type-changed"),
    ({"type": "integer"}, {"type": "number"}, "type-changed"),
    (BIGINT, BIGINT | {"minimum": 1}, "bound-narrowed"),
    (BIGINT, BIGINT | {"maximum": 99}, "bound-narrowed"),
    (BIGINT, BIGINT | {"exclusiveMaximum": 100}, "bound-narrowed"),
    ({"type": "number", "minimum": 0}, {"type": "number", "exclusiveMinimum": 0}, "bound-narrowed"),
    (TEXT, TEXT | {"maxLength": 1000}, "bound-narrowed"),
    (TEXT, TEXT | {"minLength": 1}, "bound-narrowed"),
    ({"type": "array"}, {"type": "array", "maxItems": 9}, "bound-narrowed"),
    (TEXT, TEXT | {"pattern": ""}, "keyword-changed"),
    (TEXT | {"pattern": "^a"}, TEXT | {"pattern": "^[ab]"}, "keyword-changed"),
    (TEXT | {"pattern": "^a"}, TEXT, "keyword-changed"),
    (TEXT | {"format": "email"}, TEXT, "keyword-changed"),
    (TEXT, TEXT | {"format": "email"}, "keyword-changed"),
    ({"type": "number", "multipleOf": 2}, {"type": "number", "multipleOf": 1}, "keyword-changed"),
    ({"enum": ["a", "b"]}, {"enum": ["a"]}, "value-removed"),
    ({"enum": ["a"]}, {"enum": ["b"]}, "value-removed"),
    ({"enum": ["a"]}, {"enum": ["a", None]}, "type-changed"),
    ({"enum": [1]}, {"enum": [1, True]}, "type-changed"),
    ({"enum": [1]}, {"enum": [True]}, "value-removed"),
    (TEXT | {"enum": ["a"]}, TEXT, "keyword-changed"),
    (TEXT, TEXT | {"enum": ["a"]}, "keyword-changed"),
    ({"const": "a"}, {"enum": ["b", "a"]}, "keyword-changed"),
    ({"not": {"const": 0}}, {}, "keyword-changed"),
    ({"oneOf": [TEXT | {"maxLength": 2}]}, {"oneOf": [TEXT | {"maxLength": 3}]}, "keyword-changed"),
    ({"anyOf": [TEXT]}, {"anyOf": [TEXT, BIGINT]}, "keyword-changed"),
    ({"type": "object"}, {"type": "object", "additionalProperties": False}, "keyword-changed"),
    ({"type": "array"}, {"type": "array", "items": TEXT}, "keyword-changed"),
    ({"unknown": 1}, {"unknown": 2}, "keyword-changed"),
]
DEFS = {"text": TEXT, "other": {"$ref": "#/$defs/text"}}


@pytest.mark.parametrize(("before", "after"), COMPATIBLE)
@pytest.mark.parametrize("place", [of, nested])
def test_compatible_edit_has_no_finding(place: Any, before: Any, after: Any) -> None:
    assert edit({**place(before), "$defs": DEFS}, {**place(after), "$defs": DEFS}) == []


@pytest.mark.parametrize(("before", "after", "rule"), INCOMPATIBLE)
@pytest.mark.parametrize(("place", "path"), [(of, "it"), (nested, "lines[].it")])
def test_incompatible_edit_names_rule_and_property(place: Any, path: str, before: Any, after: Any, rule: str) -> None:
    assert (rule, path) in edit(place(before), place(after))


def test_change_of_the_column_is_incompatible() -> None:
    unbounded = {"type": "integer", "minimum": 0}
    assert edit(of(BIGINT), of(unbounded)) == [("column-changed", "it")]
    assert edit(nested(BIGINT), nested(unbounded)) == []


class TestProperties:
    def test_new_optional_one_is_compatible(self) -> None:
        assert edit(payload(), of(TEXT, required=False)) == []

    def test_new_required_one_is_not(self) -> None:
        assert ("required-changed", "it") in edit(payload(), of(TEXT))
        assert ("required-changed", "it") in edit(
            payload(), payload(allOf=[{"required": ["it"]}, of(TEXT, required=False)])
        )

    @pytest.mark.parametrize(
        "closed", [{"additionalProperties": False}, {"additionalProperties": TEXT}, {"patternProperties": {"^i": TEXT}}]
    )
    def test_new_one_is_not_where_others_are_limited(self, closed: dict[str, Any]) -> None:
        assert edit(payload(**closed), of(TEXT, required=False, **closed)) == [("property-not-allowed", "it")]
        parts = [{"properties": {"a": TEXT}}], [{"properties": {"a": TEXT, "it": TEXT}}]
        before, after = (payload(**closed, allOf=part) for part in parts)
        assert edit(before, after) == [("property-not-allowed", "it")]

    def test_rule_for_one_that_was_required_already_is_not(self) -> None:
        assert ("property-not-allowed", "it") in edit(payload(required=("it",)), of(TEXT))

    def test_one_in_an_object_of_any_content_is_not(self) -> None:
        found = edit(of({"type": "object"}), of({"type": "object", "properties": {"new": TEXT}}))
        assert found == [("property-not-allowed", "it.new")]

    def test_removed_one_is_not(self) -> None:
        assert ("property-removed", "it") in edit(of(TEXT, required=False), payload())

    def test_required_one_that_becomes_optional_is_not(self) -> None:
        found = edit(of(TEXT), of(TEXT, required=False))
        assert found == [("column-changed", "it"), ("required-changed", "it")]

    def test_optional_one_that_becomes_required_is_not(self) -> None:
        assert ("required-changed", "it") in edit(of(TEXT, required=False), of(TEXT))

    def test_order_is_free(self) -> None:
        before, after = payload({"a": TEXT, "b": TEXT}, ("a", "b")), payload({"b": TEXT, "a": TEXT}, ("b", "a"))
        assert edit(before, after) == []


class TestReferences:
    def test_edit_of_a_rule_that_refers_to_itself_is_not(self) -> None:
        def tree(rule: Any) -> dict[str, Any]:
            more = {"items": {"$ref": "#/$defs/node"}}
            return of({"$ref": "#/$defs/node"}, {"node": {"properties": {"name": rule, "more": more}}})

        assert edit(tree(TEXT | {"maxLength": 2}), tree(TEXT)) == [("not-comparable", "")]
        assert edit(tree(TEXT), tree(TEXT | ANNOTATED)) == []

    def test_references_that_multiply_are_not_followed(self) -> None:
        both = {
            f"d{one}": {"properties": {"a": (more := {"$ref": f"#/$defs/d{one + 1}"}), "b": more}} for one in range(40)
        }
        before, after = (of({"$ref": "#/$defs/d0"}, {**both, "d40": rule}) for rule in (TEXT, BIGINT))
        assert edit(before, after) == [("not-comparable", "")]

    def test_unevaluated_properties_depend_on_everything(self) -> None:
        before, after = (of(rule, unevaluatedProperties=False) for rule in (TEXT | {"maxLength": 2}, TEXT))
        assert ("keyword-changed", "") in edit(before, after)


class TestCatalogs:
    @pytest.fixture
    def events(self, tmp_path: Path) -> Events:
        common = {"$defs": {"text": TEXT | {"maxLength": 9}}}
        order = of({"$ref": "../common.schema.json#/$defs/text"})
        events = Events(tmp_path).write("common.schema.json", common)
        events.aggregate("order", placed_v1=order, paid_v1=payload(), lost_v1=payload(deprecated=True))
        return events.aggregate("item", moved_v1=order)

    @staticmethod
    def compared(events: Events, after: Events) -> list[Finding]:
        before = events.load()
        return compare(before, after.load())

    def test_nothing_published_allows_everything(self, tmp_path: Path, events: Events) -> None:
        assert self.compared(Events(tmp_path / "none"), events) == []

    def test_new_events_and_versions_are_compatible(self, events: Events) -> None:
        before = events.load()
        events.aggregate("order", placed_v2=payload(), sent_v1=payload()).aggregate("refund", paid_v1=payload())
        assert compare(before, events.load()) == []

    def test_edit_of_a_shared_definition_counts_for_each_event(self, events: Events) -> None:
        before = events.load()
        events.write("common.schema.json", {"$defs": {"text": TEXT | {"maxLength": 8}, "more": BIGINT}})
        assert [(one.rule, one.file, one.property) for one in compare(before, events.load())] == [
            ("bound-narrowed", "item/moved.v1.schema.json", "it"),
            ("bound-narrowed", "order/placed.v1.schema.json", "it"),
        ]
        events.write("common.schema.json", {"$defs": {"text": TEXT}})
        assert compare(before, events.load()) == []

    def test_version_is_removed_only_after_it_was_deprecated(self, events: Events) -> None:
        before = events.load()
        for name in ("paid", "lost"):
            (events.folder / "order" / f"{name}.v1.schema.json").unlink()
        assert [(one.rule, one.file) for one in compare(before, events.load())] == [
            ("version-removed", "order/paid.v1.schema.json")
        ]

    def test_deprecation_is_compatible_and_its_end_is_not(self, events: Events) -> None:
        before = events.load()
        events.aggregate("order", paid_v1=payload(deprecated=True))
        assert compare(before, events.load()) == []
        events.aggregate("order", lost_v1=payload())
        assert [(one.rule, one.file) for one in compare(before, events.load())] == [
            ("deprecation-withdrawn", "order/lost.v1.schema.json")
        ]

    def test_aggregate_is_removed_only_after_its_events_were_deprecated(self, events: Events, tmp_path: Path) -> None:
        before = events.aggregate("gone", left_v1=payload(deprecated=True)).load()
        for name in ("gone", "item"):
            (events.folder / name).rename(tmp_path.parent / f"{tmp_path.name}-{name}")
        assert [(one.rule, one.file) for one in compare(before, events.load())] == [
            ("aggregate-removed", "item/aggregate.toml")
        ]

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
        [finding] = compare(before, events.load())
        assert (finding.rule, finding.file, finding.property) == (rule, "item/aggregate.toml", rule.partition("-")[0])

    def test_default_that_is_written_out_is_no_change(self, events: Events) -> None:
        before = events.load()
        events.aggregate("item", f'{TOML}topic = "shop.item"\npartitions = 4\nsource = "items"\n')
        assert compare(before, events.load()) == []


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


def edited(data: st.DataObject, document: dict[str, Any]) -> dict[str, Any]:
    """The document after one edit or two."""
    made = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from([one for one in places(made) if one]))
        with suppress(TypeError, AttributeError):  # a property may be called like a keyword
            change(
                data, data.draw(st.sampled_from(["move", "move", "remove", "put", "add", "enum", "property"])), place
            )
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
