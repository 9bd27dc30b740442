"""A schema as a plain tree: its references are replaced by their targets, and its annotations are left out.

Two schemas that differ only in how they are written (an inline rule or a `$ref`, a description, the order of the
members) are the same tree. `outbox_lab.events.compatibility` compares these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from outbox.events.references import MAPS, pointed_at

# They describe a value and never decide whether it is valid.
ANNOTATIONS = {
    *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples"),
    *("deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema"),
}
SCHEMAS = {
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "items", "unevaluatedItems", "contains"),
    *("not", "if", "then", "else"),
}
LISTS = {"allOf", "anyOf", "oneOf", "prefixItems"}
RECURSION = "$recursion"  # in place of a reference to a rule that this one is a part of
# They have rules inside, or depend on others of the same schema: a rule that has one is not merged with another rule.
DEPENDENT = {*SCHEMAS, *LISTS, *MAPS, "minContains", "maxContains", RECURSION}
NODES_MAX = 20_000

Json = Any
Tree = dict[str, Json]


class NotComparableError(Exception):
    """A schema that has no tree of which anything could be shown."""


def expanded(document: Mapping[str, Json]) -> Tree:
    """The tree of a document that refers to nothing outside of it. Raises NotComparableError."""
    return _Expansion(document).tree(document, ())


def is_annotation(keyword: str) -> bool:
    """Whether a keyword never decides whether a value is valid."""
    return keyword in ANNOTATIONS or keyword.startswith("x-")


def mapped(keyword: str, content: Json, made_of: Callable[[Json], Json]) -> Json:
    """The content of a keyword, with what is made of each rule in it."""
    if keyword in SCHEMAS:
        return made_of(content)
    if keyword in LISTS:
        return [made_of(rule) for rule in content]
    return {name: made_of(rule) for name, rule in content.items()} if keyword in MAPS else content


class _Expansion:
    def __init__(self, document: Mapping[str, Json]) -> None:
        self._document = document
        self._nodes = 0

    def tree(self, rule: Json, above: tuple[str, ...]) -> Tree:
        """The tree of a rule. ``above``: the references that are being followed."""
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise NotComparableError("its references multiply, which makes it too large")
        if not isinstance(rule, dict):
            return {} if rule is True else {"not": {}}
        made: Tree = {}
        for keyword, content in rule.items():
            if keyword != "$ref" and not is_annotation(keyword):
                made[keyword] = mapped(keyword, content, lambda one: self.tree(one, above))
        made = {name: content for name, content in made.items() if not _is_idle(name, content)}
        return made if "$ref" not in rule else self._joined(made, rule["$ref"], above)

    def _joined(self, rest: Tree, reference: str, above: tuple[str, ...]) -> Tree:
        """A rule and the target of its reference, both of which apply."""
        if reference in above:
            target: Tree = {RECURSION: reference}
        else:
            target = self.tree(pointed_at(self._document, reference), (*above, reference))
        if not rest:
            return target
        if not rest.keys() & target.keys() and not DEPENDENT & (rest.keys() | target.keys()):
            return {**target, **rest}
        return {**rest, "allOf": [*rest.get("allOf", []), target]}


def _is_idle(keyword: str, content: Json) -> bool:
    """Whether a keyword with this content allows everything, as if it were absent."""
    if keyword in ("additionalProperties", "items", "propertyNames"):
        return bool(content == {})
    return (keyword, content) in (("uniqueItems", False), ("required", []), ("properties", {}))
