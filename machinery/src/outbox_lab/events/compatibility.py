"""Which edit of a published event is compatible: what readers, and the events that are written already, rely on.

An edit is compatible if every payload that was valid stays valid and becomes the same columns. Only edits that can be
shown to be so are accepted; docs/events.md lists them. For all others a new version is declared beside the old one.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from outbox.events.catalog import AGGREGATE_FILE, Aggregate, Catalog
from outbox.events.schema import EventSchema
from outbox_lab.events import Finding
from outbox_lab.events.expansion import RECURSION, NotComparableError, Tree, expanded

Problem = tuple[str, str, str]  # rule, property, message

# How the new bound compares with the old one if it is not narrower.
BOUNDS: Mapping[str, Callable[[Any, Any], bool]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), operator.le),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), operator.ge),
}
COMPARED = {*BOUNDS, "type", "enum", "required", "properties", "additionalProperties", "items", "allOf", "anyOf"}
UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")  # they depend on all of a schema
LEFT_OUT = object()


def compare(published: Catalog, current: Catalog) -> list[Finding]:
    """Every edit by which ``current`` may break readers of what ``published`` declares."""
    return [
        finding
        for aggregate in published.aggregates.values()
        for finding in _aggregate(aggregate, current.aggregates.get(aggregate.name))
    ]


def compare_schemas(published: EventSchema, current: EventSchema) -> list[Finding]:
    """Every edit of one version of an event by which it may break readers."""
    found = {(name, rule): message for rule, name, message in _schema(published, current)}
    return [Finding(rule, published.file, name, message) for (name, rule), message in found.items()]


def _schema(published: EventSchema, current: EventSchema) -> Iterator[Problem]:
    if published.is_deprecated and not current.is_deprecated:
        message = "it is no longer deprecated, and readers may have dropped it: declare a new version"
        yield "deprecation-withdrawn", "", message
    if _same(published.document, current.document):
        return
    try:
        old, new = expanded(published.document), expanded(current.document)
        if RECURSION in f"{old}{new}" and not _same(old, new):
            raise NotComparableError("it refers to itself")
    except NotComparableError as error:
        yield "not-comparable", "", f"it was edited, and no edit of it can be shown to be compatible: {error}"
        return
    yield from _rule(old, new, "")
    yield from _columns(published, current)


def _aggregate(old: Aggregate, new: Aggregate | None) -> Iterator[Finding]:
    is_retired = all(schema.is_deprecated for schema in old.schemas)
    if new is None:
        if not is_retired:
            message = "the aggregate type is gone, and not all of its events were deprecated"
            yield Finding("aggregate-removed", f"{old.name}/{AGGREGATE_FILE}", "", message)
        return
    if not new.published:
        message = "it was published, and readers rely on it: remove `published = false`"
        yield Finding("published-withdrawn", f"{old.name}/{AGGREGATE_FILE}", "", message)
    for name in ("key", "version", "topic", "partitions"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            message = (
                f"it was {_shown(before)} and is {_shown(after)}; events of a key would lose their order or readers"
            )
            yield Finding(f"{name}-changed", f"{old.name}/{AGGREGATE_FILE}", name, message)
    for schema in old.schemas:
        edited = new.events.get(schema.type, {}).get(schema.version)
        if edited is not None:
            yield from compare_schemas(schema, edited)
        elif not schema.is_deprecated:
            yield Finding("version-removed", schema.file, "", "it is gone, and it was not deprecated before")


def _columns(published: EventSchema, current: EventSchema) -> Iterator[Problem]:
    columns = {column.name: column for column in current.columns}
    for old in published.columns:
        new = columns.get(old.name)
        if new is not None and new.type != old.type:
            yield "column-changed", old.name, f"its column was {old.type} and would be {new.type}"
        elif new is not None and new.is_nullable != old.is_nullable:
            yield "column-changed", old.name, f"its column {'may' if new.is_nullable else 'can no longer'} be NULL"
    known = {column.name for column in published.columns}
    for name, column in columns.items():
        if name not in known and not column.is_nullable:
            yield "required-changed", name, "it is new and required, so events that are written already lack it"


def _rule(old: Tree, new: Tree, path: str, *, is_closed: bool = False) -> Iterator[Problem]:
    """Problems of a rule that may refuse a value that the old one allowed.

    ``is_closed``: another rule of the value limits its properties.
    """
    if _same(old, new):
        return
    for compared in (_type, _values, _bounds, _others):
        yield from compared(old, new, path)
    is_closed = is_closed or _limits_properties(old) or _limits_properties(new)
    yield from _properties(old, new, path, is_closed=is_closed)
    if ("items" in old) is not ("items" in new):
        yield _changed("items", path)
    elif "items" in old:
        yield from _rule(old["items"], new["items"], f"{path}[]")
    for keyword in ("allOf", "anyOf"):
        before, after = old.get(keyword, []), new.get(keyword, [])
        if len(before) != len(after):
            yield _changed(keyword, path)
        else:
            for one, other in zip(before, after, strict=True):
                yield from _rule(one, other, path, is_closed=is_closed)


def _type(old: Tree, new: Tree, path: str) -> Iterator[Problem]:
    before, after = _types(old), _types(new)
    if before != after:
        yield "type-changed", path, f"its type was {_shown(before or None)} and is {_shown(after or None)}"


def _values(old: Tree, new: Tree, path: str) -> Iterator[Problem]:
    if ("enum" in old) is not ("enum" in new):
        yield _changed("enum", path)
        return
    before, after = ({_json(value): value for value in rule.get("enum", ())} for rule in (old, new))
    gone = [value for name, value in before.items() if name not in after]
    if gone:
        yield "value-removed", path, f"{_shown(gone[0])} is no longer allowed"
    kinds = {type(value) for value in before.values()}
    other = [value for value in after.values() if type(value) not in kinds]
    if other:
        yield "type-changed", path, f"{_shown(other[0])} has another type than the values before"


def _bounds(old: Tree, new: Tree, path: str) -> Iterator[Problem]:
    for keyword, is_as_wide in BOUNDS.items():
        if keyword in new and (keyword not in old or not is_as_wide(new[keyword], old[keyword])):
            yield "bound-narrowed", path, f"{keyword} {new[keyword]} is narrower than before"


def _others(old: Tree, new: Tree, path: str) -> Iterator[Problem]:
    """Keywords of which no edit is accepted, and those that make a rule depend on all others."""
    for keyword in sorted((old.keys() | new.keys()) - COMPARED):
        if keyword in UNEVALUATED or not _same(old.get(keyword, LEFT_OUT), new.get(keyword, LEFT_OUT)):
            yield _changed(keyword, path)


def _properties(old: Tree, new: Tree, path: str, *, is_closed: bool) -> Iterator[Problem]:
    before, after = old.get("properties", {}), new.get("properties", {})
    required = {*old.get("required", ())}, {*new.get("required", ())}
    for name in sorted(required[0] ^ required[1]):
        is_new = name in required[1]
        message = "it became required" if is_new else "it is no longer required, and readers rely on it"
        yield "required-changed", _joined(path, name), message
    for name in before:
        if name in after:
            yield from _rule(before[name], after[name], _joined(path, name))
        else:
            yield "property-removed", _joined(path, name), "it is gone"
    for name in after.keys() - before.keys():
        if is_closed or name in required[0] or "properties" not in old:
            message = "it is new, and events that are written already may have it with any content"
            yield "property-not-allowed", _joined(path, name), message
    if not _same(old.get("additionalProperties"), new.get("additionalProperties")) and "additionalProperties" in new:
        yield _changed("additionalProperties", path)


def _limits_properties(rule: Tree) -> bool:
    return "additionalProperties" in rule or "patternProperties" in rule


def _types(rule: Tree) -> list[str]:
    found = rule.get("type", [])
    return sorted([found] if isinstance(found, str) else found)


def _same(one: Any, other: Any) -> bool:
    """Whether two are the same JSON. To Python, true is 1 as well."""
    return one is other or (LEFT_OUT not in (one, other) and _json(one) == _json(other))


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _changed(keyword: str, path: str) -> Problem:
    return "keyword-changed", path, f"{keyword} is not what it was"


def _shown(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " or ".join(map(str, value))
    return "none" if value is None else str(value)
