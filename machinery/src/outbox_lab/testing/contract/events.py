"""Histories of events, made from the declared schemas of a sink's topics.

A history has few keys and few texts, so that events meet. Its events are of every type and version that the topics
have, also of those that the sink skips. The events of a key are numbered 1, 2, 3 and so on, where their aggregate
numbers them. Their ids need not be in their order: the clocks of two processes differ.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypothesis import reject
from hypothesis import strategies as st

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.events.catalog import Aggregate
from outbox.events.schema import EventSchema
from outbox.sink.decoding.records import Record
from outbox.sink.spec import SinkSpec
from outbox_lab.events.expansion import NotComparableError, Tree, expanded
from outbox_lab.testing.contract import values
from outbox_lab.testing.sinks import made_id, made_record

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
        self._values = {name: values.values(rule, self._examples(name)) for name, rule in self._rules.items()}
        self.keys = values.values(rules[aggregate.key], self._examples(aggregate.key))
        column = next(column for column in schema.columns if column.name == aggregate.key)
        self.key_kind = f"{column.name}:{column.type}"

    @property
    def pools(self) -> dict[str, st.SearchStrategy[Any]]:
        """The strategies of properties of which a history has few values, by what events of other schemas share."""
        return {
            _kind(name, rule): self._values[name] for name, rule in self._rules.items() if not values.is_number(rule)
        }

    def drafts(self, pools: Mapping[str, Sequence[Any]]) -> st.SearchStrategy[_Draft]:
        """Events with values of these pools."""
        made = {
            name: self._values[name] if values.is_number(rule) else st.sampled_from(pools[_kind(name, rule)])
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
        return values.merged(expanded(schema.document))
    except NotComparableError as error:
        raise Failure(
            f"no payload of {schema.name} could be made: {error}", "simplify the schema", code="contract-no-values"
        ) from None
