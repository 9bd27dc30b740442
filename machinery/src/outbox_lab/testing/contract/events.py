"""Histories of events, made from the declared schemas of a sink's topics.

A history has few keys and few texts, so that events meet. Its events are of every type and version that the topics
have, also of those that the sink skips. The events of a key are numbered 1, 2, 3 and so on, where their aggregate
numbers them. Their ids need not be in their order: the clocks of two processes differ.

Values are Hypothesis strategies. A schema is the tree of `outbox_lab.events.expansion`. Keywords that narrow a type
make values. The validator of `append` and the sinks, which knows all other keywords, then leaves out those that are
not valid. If none is left, the examples of the schema file serve.

Numbers are small, with the bounds of the schema among them, so that sums stay readable and overflows are found.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add, or_
from typing import Any, NamedTuple

import jsonschema_rs
from hypothesis import Phase, find, reject, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.events.catalog import Aggregate
from outbox.events.schema import EventSchema
from outbox.sink.decoding.records import Record
from outbox.sink.spec import SinkSpec
from outbox_lab.events.expansion import RECURSION, NotComparableError, Tree, expanded
from outbox_lab.testing.sinks import made_id, made_record

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


KEYS = 2
POOL_MAX = 2  # different values of a property that is no number
EVENTS = (6, 16)  # of which a quarter is left out
PRESENCES = 4
CHANCES = 8


@dataclass(frozen=True)
class Lifecycle:
    """Which histories a domain has. ``begins``: if it names events of an aggregate, the first event of a key is one of
    those. ``once``: events that a key has once at most. Both are names such as ``order.placed``.
    """

    begins: frozenset[str] = frozenset()
    once: frozenset[str] = frozenset()


class Sent(NamedTuple):
    """An event as it was sent to its topic.

    ``chance`` decides what a way does with it, so that the others stay as they are if an event is left out.
    """

    topic: str
    schema: EventSchema
    key: str
    event_id: str
    payload: Mapping[str, Any]
    chance: int = 0

    @property
    def is_set_aside(self) -> bool:
        """Whether it becomes a dead letter first, where some do."""
        return bool(self.chance & 1)

    @property
    def ends_batch(self) -> bool:
        """Whether a batch ends behind it, where batches end anywhere."""
        return bool(self.chance & 2)

    @property
    def record(self) -> Record:
        """The record that carries it."""
        return made_record(self.schema, self.key, self.event_id, self.payload)

    def __str__(self) -> str:
        return f"{self.schema.name} {json.dumps(self.payload)} (id {self.event_id})"


@dataclass(frozen=True)
class History:
    """Events in the order in which they were sent."""

    sent: Sequence[Sent]

    def __str__(self) -> str:
        return "\n".join(f"  {number}. {one}" for number, one in enumerate(self.sent, 1))


def histories(settings: Settings, spec: SinkSpec, lifecycle: Lifecycle) -> st.SearchStrategy[History]:
    """The histories of the topics of a sink that a lifecycle allows.

    Raises Failure `contract-no-values` if no payload can be made for a schema.
    """
    topics = catalog.of_project(settings).topics
    aggregates = [aggregate for topic in spec.topics for aggregate in topics[topic]]
    return _histories(
        [_Maker(aggregate, schema) for aggregate in aggregates for schema in aggregate.schemas], lifecycle
    )


class _Draft(NamedTuple):
    """An event without what depends on the others of its history. ``key`` is the number of its key."""

    maker: _Maker
    key: int
    payload: Mapping[str, Any]
    chance: int
    presence: int


class _Maker:
    """Makes events of one schema."""

    def __init__(self, aggregate: Aggregate, schema: EventSchema) -> None:
        self.aggregate, self.schema = aggregate, schema
        tree = _tree(schema)
        rules = tree.get("properties", {})
        given = {name for name in (aggregate.key, aggregate.version) if name is not None}
        self._required = set(tree.get("required", ()))
        self._rules = {name: rule for name, rule in rules.items() if name not in given}
        self._values = {name: values(rule, self._examples(name)) for name, rule in self._rules.items()}
        self.keys = values(rules[aggregate.key], self._examples(aggregate.key))
        column = next(column for column in schema.columns if column.name == aggregate.key)
        self.key_kind = f"{column.name}:{column.type}"

    @property
    def pools(self) -> dict[str, st.SearchStrategy[Any]]:
        """The strategies of properties of which a history has few values, by what events of other schemas share."""
        return {_kind(name, rule): self._values[name] for name, rule in self._rules.items() if not is_number(rule)}

    def drafts(self, pools: Mapping[str, Sequence[Any]]) -> st.SearchStrategy[_Draft]:
        """Events with values of these pools."""
        made = {
            name: self._values[name] if is_number(rule) else st.sampled_from(pools[_kind(name, rule)])
            for name, rule in self._rules.items()
        }
        required = {name: one for name, one in made.items() if name in self._required}
        optional = {name: one for name, one in made.items() if name not in self._required}
        payloads = st.fixed_dictionaries(required, optional=optional)
        return st.builds(
            _Draft,
            st.just(self),
            st.integers(0, KEYS - 1),
            payloads,
            st.integers(0, CHANCES - 1),
            st.integers(0, PRESENCES - 1),
        )

    def payload(self, draft: _Draft, key: Any, version: int) -> dict[str, Any]:
        """The whole payload. A history in which it is not valid is rejected."""
        found = {self.aggregate.key: key, **draft.payload}
        if self.aggregate.version is not None:
            found[self.aggregate.version] = version
        if self.schema.violation(found) is not None:  # a rule about several properties
            reject()
        return found

    def _examples(self, name: str) -> list[Any]:
        return [one[name] for one in self.schema.examples if isinstance(one, dict) and name in one]


@st.composite
def _histories(draw: st.DrawFn, makers: Sequence[_Maker], lifecycle: Lifecycle) -> History:
    keys = {maker.key_kind: draw(st.lists(maker.keys, min_size=1, max_size=KEYS, unique=True)) for maker in makers}
    pools = {
        kind: draw(st.lists(of_kind, min_size=1, max_size=POOL_MAX))
        for kind, of_kind in {kind: one for maker in makers for kind, one in maker.pools.items()}.items()
    }
    drafts = st.one_of([maker.drafts(pools) for maker in makers])
    drawn = draw(st.lists(drafts, min_size=EVENTS[0], max_size=EVENTS[1]))
    drawn = [one for one in drawn if one.presence]  # 0 is what Hypothesis tries first to shorten a history
    numbers = draw(st.permutations(range(len(drawn))))
    sent = _sent(_possible(drawn, keys, lifecycle), numbers)
    if not sent:
        reject()
    return History(sent)


def _possible(
    drawn: Sequence[_Draft], keys: Mapping[str, Sequence[Any]], lifecycle: Lifecycle
) -> Iterator[tuple[_Draft, Any]]:
    """The events that a lifecycle allows, each with its key."""
    begun, had = set[tuple[str, str]](), set[tuple[str, str]]()
    beginnings = {name.rpartition(".")[0] for name in lifecycle.begins}
    for draft in drawn:
        of_kind = keys[draft.maker.key_kind]
        key = of_kind[draft.key % len(of_kind)]
        aggregate, event = draft.maker.aggregate.name, draft.maker.schema.event
        must_begin = aggregate in beginnings and (aggregate, str(key)) not in begun
        is_repeated = event in lifecycle.once and (event, str(key)) in had
        if (must_begin and event not in lifecycle.begins) or is_repeated:
            continue
        begun.add((aggregate, str(key)))
        had.add((event, str(key)))
        yield draft, key


def _sent(drafts: Iterator[tuple[_Draft, Any]], numbers: Sequence[int]) -> list[Sent]:
    versions = Counter[tuple[str, str]]()
    sent = list[Sent]()
    for (draft, key), number in zip(drafts, numbers, strict=False):
        topic = draft.maker.aggregate.topic
        versions[topic, str(key)] += 1
        payload = draft.maker.payload(draft, key, versions[topic, str(key)])
        sent.append(Sent(topic, draft.maker.schema, str(key), made_id(number), payload, draft.chance))
    return sent


def _kind(name: str, rule: Any) -> str:
    return f"{name}:{rule}"


def _tree(schema: EventSchema) -> Tree:
    """The schema as one rule. Raises Failure if it has none."""
    try:
        return merged(expanded(schema.document))
    except NotComparableError as error:
        raise Failure(
            f"no payload of {schema.name} could be made: {error}", "simplify the schema", code="contract-no-values"
        ) from None
