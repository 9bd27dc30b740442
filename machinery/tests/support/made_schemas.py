"""Schemas of events, and payloads that may be valid by them, as hypothesis makes them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

NAMES = ["a", "b", "c"]
NUMBERS = st.integers(-3, 3)
SIZES = st.integers(0, 3)
VALUES = ["", "x", "xx", "ab", 0, 1, True, None, Decimal("1.5")]


def some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def typed(name: Any, rest: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return rest.map(lambda keywords: {"type": name, **keywords})


ENUM = st.lists(st.sampled_from([value for value in VALUES if not isinstance(value, Decimal)]), min_size=1, max_size=3)
LIMITS = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), NUMBERS)
FORMATS = st.sampled_from(["uuid", "date-time", "email"])
LEAVES = st.one_of(
    typed("string", some(minLength=SIZES, maxLength=SIZES, pattern=st.sampled_from(["^x", "b$"]), format=FORMATS)),
    typed("integer", some(**LIMITS, multipleOf=st.integers(1, 3))),
    typed("number", some(**LIMITS)),
    st.sampled_from([{"type": "boolean"}, {"type": ["string", "null"]}, {}, True, {"$ref": "#/$defs/shared"}]),
    st.builds(lambda values: {"enum": values}, ENUM),
    st.sampled_from([{"const": "x"}, {"$ref": "#/$defs/shared", "minLength": 1}, {"not": {"const": "x"}}]),
)


def objects(rules: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    keywords = some(
        properties=st.dictionaries(st.sampled_from(NAMES), rules, max_size=3),
        required=st.lists(st.sampled_from(NAMES), unique=True, max_size=2),
        additionalProperties=st.sampled_from([False, True, {"type": "string"}]),
        allOf=st.lists(
            rules.filter(lambda rule: "properties" in rule if isinstance(rule, dict) else False), max_size=1
        ),
    )
    return typed("object", keywords)


RULES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda rules: st.one_of(
        objects(rules),
        typed("array", some(items=rules, minItems=SIZES, maxItems=SIZES, uniqueItems=st.booleans())),
        st.builds(
            lambda keyword, of: {keyword: of},
            st.sampled_from(["anyOf", "oneOf"]),
            st.lists(rules, min_size=1, max_size=2),
        ),
    ),
    max_leaves=3,
)
DOCUMENTS = st.builds(
    lambda top, shared, properties: {
        **top,
        "properties": {**top.get("properties", {}), **properties},
        "$defs": {"shared": shared},
    },
    objects(RULES),
    LEAVES.filter(lambda rule: "$ref" not in rule if isinstance(rule, dict) else True),
    st.dictionaries(st.sampled_from(NAMES), RULES, min_size=1, max_size=2),
)
STRINGS = ["", "x", "xx", "ab", "xxb", "2026-11-21T10:00:00Z", "00000000-0000-7000-8000-000000000001", "a@b.example"]
SCALARS = st.sampled_from([*VALUES, *STRINGS]) | NUMBERS
POOLS: dict[str, st.SearchStrategy[Any]] = {
    "string": st.sampled_from(STRINGS),
    "integer": NUMBERS | st.just(Decimal("2.0")),
    "number": NUMBERS | st.just(Decimal("1.5")),
    "boolean": st.booleans(),
}


def parts(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """A rule and those that apply to the same value."""
    return [
        tree,
        *(found for name in ("allOf", "anyOf", "oneOf") for one in tree.get(name, ()) for found in parts(one)),
    ]


def value(data: st.DataObject, trees: list[dict[str, Any]]) -> Any:
    """A value that may be valid by these rules. Its properties are all declared, where any are."""
    trees = [part for tree in trees for part in parts(tree)]
    named: list[Any] = [content for tree in trees for content in tree.get("enum", ())]
    named += [tree["const"] for tree in trees if "const" in tree]
    types = {tree["type"] for tree in trees if isinstance(tree.get("type"), str)}
    if data.draw(st.integers(0, 2)) and named:
        return data.draw(st.sampled_from(named))
    if "object" in types:
        names = sorted({name for tree in trees for name in tree.get("properties", ())}) or NAMES
        chosen = [name for name in names if data.draw(st.integers(0, 3))]
        return {
            name: value(data, [tree["properties"][name] for tree in trees if name in tree.get("properties", ())])
            for name in chosen
        }
    if "array" in types:
        return [value(data, [tree["items"] for tree in trees if "items" in tree]) for _ in range(data.draw(SIZES))]
    return data.draw(st.one_of([POOLS[name] for name in sorted(types)] or [SCALARS]))
