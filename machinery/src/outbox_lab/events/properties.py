"""The properties of a version of an event, nested ones too, and the differences between two versions, for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from outbox.events.references import has, resolve
from outbox.events.schema import PERSONAL, EventSchema
from outbox_lab.events.expansion import is_annotation

PROPERTIES_MAX = 1_000  # of a version; references may multiply
# What is shown elsewhere than among the rules of a property.
SHOWN = {"type", "format", "required", "properties", "items", "$ref", "allOf"}

Json = Any


class Property(NamedTuple):
    """A property by its path, such as ``lines[].product``."""

    path: str
    type: str
    rules: str
    """Its other keywords, such as ``minimum 1, maximum 9``."""
    is_required: bool
    is_personal: bool
    description: str


class Difference(NamedTuple):
    """A property that a later version has added, removed or changed."""

    kind: str
    path: str
    detail: str


def properties(schema: EventSchema) -> list[Property]:
    """The properties of a version, in their order."""
    found: dict[str, Property] = {}
    for one in islice(_below(schema.document, schema.document, "", ("#",)), PROPERTIES_MAX):
        found.setdefault(one.path, one)
    return list(found.values())


def differences(old: EventSchema, new: EventSchema) -> list[Difference]:
    """The differences between two versions of an event."""
    before, after = ({one.path: one for one in properties(schema)} for schema in (old, new))
    found = [Difference("removed", path, one.type) for path, one in before.items() if path not in after]
    for path, one in after.items():
        if path not in before:
            found.append(Difference("added", path, f"{one.type}, {_need(one)}"))
        elif changes := list(_changes(before[path], one)):
            found.append(Difference("changed", path, "; ".join(changes)))
    return found


def _changes(old: Property, new: Property) -> Iterator[str]:
    if old.type != new.type:
        yield f"{old.type} → {new.type}"
    if old.is_required != new.is_required:
        yield f"{_need(old)} → {_need(new)}"
    if old.rules != new.rules:
        yield f"{old.rules or 'no rule'} → {new.rules or 'no rule'}"
    if old.is_personal != new.is_personal:
        yield "personal data" if new.is_personal else "no longer personal data"


def _need(one: Property) -> str:
    return "required" if one.is_required else "optional"


def _below(document: Mapping[str, Json], rule: Json, path: str, above: tuple[str, ...]) -> Iterator[Property]:
    """The properties in a rule. ``above``: the references that lead to it; a rule that refers to itself ends there."""
    reference = rule.get("$ref", path) if isinstance(rule, dict) else "#"
    if reference in above:
        return
    above = (*above, reference)
    parts = list(_parts(document, rule))
    required = {name for part in parts for name in part.get("required", ())}
    for part in parts:
        for name, child in (part.get("properties") or {}).items():
            inner = f"{path}.{name}" if path else name
            yield _property(document, child, inner, is_required=name in required)
            yield from _below(document, child, inner, above)
        if "items" in part:
            yield from _below(document, part["items"], f"{path}[]", above)


def _parts(document: Mapping[str, Json], rule: Json) -> Iterator[Mapping[str, Json]]:
    """A rule and what it includes by `$ref` or ``allOf``."""
    waiting, followed = [rule], set[str]()
    while waiting:
        part = resolve(document, waiting.pop(0))
        yield part
        for one in part.get("allOf", ()):
            reference = one.get("$ref", "") if isinstance(one, dict) else ""
            if reference not in followed:
                followed |= {reference} - {""}
                waiting.append(one)


def _property(document: Mapping[str, Json], rule: Json, path: str, *, is_required: bool) -> Property:
    resolved = resolve(document, rule)
    rules = [
        f"{keyword} {json.dumps(content, ensure_ascii=False)}"
        for keyword, content in resolved.items()
        if keyword not in SHOWN and not is_annotation(keyword)
    ]
    said = resolved.get("description")
    return Property(
        path=path,
        type=_type(document, resolved),
        rules=", ".join(rules),
        is_required=is_required,
        is_personal=has(document, rule, PERSONAL),
        description=said if isinstance(said, str) else "",
    )


def _type(document: Mapping[str, Json], resolved: Mapping[str, Json]) -> str:
    named = resolved.get("type", [])
    types = [named] if isinstance(named, str) else list(named)
    if "items" in resolved and "array" in types:
        types[types.index("array")] = f"array of {_type(document, resolve(document, resolved['items']))}"
    text = " or ".join(types) or ("enum" if "enum" in resolved else "any")
    return f"{text} ({resolved['format']})" if "format" in resolved else text
