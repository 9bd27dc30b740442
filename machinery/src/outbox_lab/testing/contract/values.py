"""Values that a JSON Schema allows, as Hypothesis strategies.

The schema is the tree of `outbox_lab.events.expansion`. The keywords that narrow a type make values. The validator of
`append` and the sinks, which knows all other keywords, then leaves out those that are not valid. If none is left, the
examples of the schema file serve.

Numbers are small, with the bounds of the schema among them, so that sums stay readable and overflows are found.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import add, or_
from typing import Any

import jsonschema_rs
from hypothesis import Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from outbox.base.errors import Failure
from outbox_lab.events.expansion import RECURSION

Json = Any
Rule = Mapping[str, Json]
Strategy = st.SearchStrategy[Json]

SMALL = 100
QUARTERS = 4  # numbers are multiples of 1/4, which have exact binary and decimal forms
ITEMS_MAX = 3
TEXT_MAX = 8
LETTERS = "abcdefgh "
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
UUIDS = [f"01a1fc75-167d-7239-af57-{number:012x}" for number in range(1, 7)]
FORMATS: Mapping[str, Sequence[str]] = {
    "uuid": UUIDS,
    "date-time": [
        "2026-11-21T10:00:00Z",
        "2026-11-21T10:00:00.123456Z",
        "2026-11-21T23:59:59.999999Z",
        "2026-11-22T00:00:00Z",
        "2026-11-21T12:00:00+02:00",
    ],
    "date": ["2026-11-21", "2026-11-22", "2024-02-29"],
    "time": ["10:00:00Z", "23:59:59Z"],
    "duration": ["P1D", "PT1H"],
    "email": ["a@example.org", "b@example.org"],
    "hostname": ["example.org", "a.example.org"],
    "ipv4": ["192.0.2.1", "192.0.2.2"],
    "ipv6": ["2001:db8::1", "2001:db8::2"],
    "uri": ["https://example.org/a", "https://example.org/b"],
    "uri-reference": ["https://example.org/a", "/b"],
    "json-pointer": ["/a", "/a/0"],
    "regex": ["a+", "[a-z]*"],
}

# How two contents of a keyword become one; of any other keyword the last one is taken.
JOINED: Mapping[str, Callable[[Json, Json], Json]] = {
    "properties": or_,
    "required": add,
    "allOf": add,
    "minimum": max,
    "maximum": min,
}


def values(rule: Json, examples: Sequence[Json] = ()) -> Strategy:
    """Values that a rule allows. ``examples`` are values for a rule of which none could be made.

    Raises Failure `contract-no-values` if there is neither.
    """
    if rule in (True, {}):
        return st.sampled_from([None, True, 0, "a"])
    is_valid = _validity(rule)
    usable = [example for example in examples if is_valid(example)]
    made = _made(rule)
    if made is not None and _gives_any(made, is_valid):
        return made.filter(is_valid)
    if usable:
        return st.sampled_from(usable)
    raise Failure(
        f"no value could be made for the rule {str(dict(rule))[:200]}",
        "give the event's schema examples",
        code="contract-no-values",
    )


def is_number(rule: Json) -> bool:
    """Whether all its values are numbers: each event has one of its own, because those of a history are never compared.
    Others are drawn from a few.
    """
    types = set(_types(rule)) if isinstance(rule, dict) else set()
    return bool(types) and types <= {"integer", "number", "null"} and not {"enum", "const"} & rule.keys()


def merged(rule: Rule) -> dict[str, Json]:
    """The rule with all parts of its ``allOf`` in one, as far as values are made by it."""
    found = dict(rule)
    while "allOf" in found:
        parts = [part for part in found.pop("allOf") if isinstance(part, dict)]
        found = _merged([found, *parts])
    return found


def _made(rule: Rule) -> Strategy | None:
    """A strategy of which most values are valid; None if the rule has nothing to make values by."""
    if "const" in rule:
        return st.just(rule["const"])
    if "enum" in rule:
        return st.sampled_from(rule["enum"])
    for keyword in ("anyOf", "oneOf"):
        if keyword in rule:
            rest = {name: content for name, content in rule.items() if name != keyword}
            return _any_of(_made(_merged([rest, choice])) for choice in rule[keyword] if isinstance(choice, dict))
    if "allOf" in rule:
        return _made(merged(rule))
    if RECURSION in rule:
        return None
    return _any_of(MAKERS[type_](rule) for type_ in _types(rule) or TYPES)


def _any_of(found: Iterator[Strategy | None]) -> Strategy | None:
    usable = [one for one in found if one is not None]
    return st.one_of(usable) if usable else None


def _types(rule: Rule) -> list[str]:
    found = rule.get("type", [])
    return [found] if isinstance(found, str) else list(found)


def _merged(rules: Sequence[Rule]) -> dict[str, Json]:
    """The rules as one, for making values: what they say together is validated afterwards."""
    merged: dict[str, Json] = {}
    for rule in rules:
        for keyword, content in rule.items():
            is_joined = keyword in JOINED and keyword in merged
            merged[keyword] = JOINED[keyword](merged[keyword], content) if is_joined else content
    return merged


def _integers(rule: Rule) -> Strategy:
    lowest, highest = _bounds(rule, 1)
    step = int(rule["multipleOf"]) if float(rule.get("multipleOf", 0.5)).is_integer() else 1
    small = st.integers(*_small(lowest, highest, SMALL * step)).map(lambda one: one - one % step)
    bounds = [bound for bound in (lowest, highest) if bound is not None and abs(bound) > SMALL]
    return st.one_of(small, small, small, st.sampled_from(bounds)) if bounds else small


def _numbers(rule: Rule) -> Strategy:
    return st.integers(*_small(*_bounds(rule, QUARTERS), SMALL * QUARTERS)).map(lambda one: one / QUARTERS)


def _bounds(rule: Rule, scale: int) -> tuple[int | None, int | None]:
    """The lowest and the highest allowed integer of a rule whose numbers are multiplied by ``scale``."""
    lows = [math.ceil(rule["minimum"] * scale)] if "minimum" in rule else []
    lows += [math.floor(rule["exclusiveMinimum"] * scale) + 1] if "exclusiveMinimum" in rule else []
    highs = [math.floor(rule["maximum"] * scale)] if "maximum" in rule else []
    highs += [math.ceil(rule["exclusiveMaximum"] * scale) - 1] if "exclusiveMaximum" in rule else []
    return max(lows, default=None), min(highs, default=None)


def _small(lowest: int | None, highest: int | None, size: int) -> tuple[int, int]:
    """The allowed range nearest to 0."""
    low = -size if lowest is None else max(lowest, -size)
    high = size if highest is None else min(highest, size)
    if low > high:
        return (low, low + size) if low > 0 else (high - size, high)
    return low, high


def _strings(rule: Rule) -> Strategy:
    shortest, longest = rule.get("minLength", 0), rule.get("maxLength")
    if rule.get("format") in FORMATS:
        is_valid = _validity(rule)
        known = [text for text in FORMATS[rule["format"]] if is_valid(text)]
        if known:
            return st.sampled_from(known)
    if "pattern" in rule:
        try:
            re.compile(rule["pattern"])
        except re.error:
            return st.nothing()
        return st.from_regex(rule["pattern"], fullmatch=rule["pattern"].endswith("$"))
    at_most = shortest + TEXT_MAX if longest is None else min(longest, shortest + TEXT_MAX)
    return st.text(LETTERS, min_size=shortest, max_size=at_most)


def _arrays(rule: Rule) -> Strategy:
    shortest, longest = rule.get("minItems", 0), rule.get("maxItems", math.inf)
    items = _made_or_any(rule.get("items", True))
    first = [_made_or_any(one) for one in rule.get("prefixItems", [])]
    others = st.lists(
        items,
        min_size=max(shortest - len(first), 0),
        max_size=int(max(min(longest, max(shortest, ITEMS_MAX)) - len(first), 0)),
        unique_by=str if rule.get("uniqueItems") else None,
    )
    return st.tuples(st.tuples(*first), others).map(lambda both: [*both[0], *both[1]]) if first else others


def _objects(rule: Rule) -> Strategy:
    properties = rule.get("properties", {})
    made = {name: _made_or_any(one) for name, one in properties.items()}
    required = [name for name in rule.get("required", []) if name in made]
    optional = {name: one for name, one in made.items() if name not in required}
    return st.fixed_dictionaries({name: made[name] for name in required}, optional=optional)


def _made_or_any(rule: Json) -> Strategy:
    if rule is False:
        return st.nothing()
    made = _made(rule) if rule not in (True, {}) else None
    return st.sampled_from([None, True, 0, "a"]) if made is None else made


MAKERS: Mapping[str, Callable[[Rule], Strategy]] = {
    "null": lambda _: st.none(),
    "boolean": lambda _: st.booleans(),
    "integer": _integers,
    "number": _numbers,
    "string": _strings,
    "array": _arrays,
    "object": _objects,
}


def _validity(rule: Rule) -> Callable[[Json], bool]:
    """Whether a value is valid. A rule that refers to itself cannot be asked alone: the whole payload is validated."""
    if RECURSION in str(rule):
        return lambda _: True
    return jsonschema_rs.Draft202012Validator(dict(rule), validate_formats=True).is_valid


def _gives_any(strategy: Strategy, is_valid: Callable[[Json], bool]) -> bool:
    """Whether a strategy gives a valid value soon."""
    soon = settings(max_examples=20, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    try:
        find(strategy, is_valid, settings=soon)
    except HypothesisException:
        return False
    return True
