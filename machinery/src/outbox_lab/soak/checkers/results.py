"""Each sink has what its strategy promises: nothing more, or the repeats that it does not recognise.

Totals alone would hide a lost event behind another one of the same size. So the highest version of each key, and the
events that a strategy remembers or counts, are compared too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal

from outbox_lab.soak.finding import Finding, findings
from outbox_lab.soak.seen import ComparedTotals, Seen, Sink, TopicEvent

ZERO = Decimal(0)
Totals = Mapping[str, Decimal]


def check(seen: Seen, *, may_reread: bool) -> list[Finding]:
    """Compare every sink with the source and with the events on the topics.

    ``may_reread``: whether a fault may have let the sinks read records again.
    """
    found: list[Finding] = []
    records = Counter(event.id for event in seen.events)
    for sink in seen.sinks:
        found += findings(f"{sink.name} sets no valid event aside", sink.set_aside)
        found += findings(f"{sink.name} remembers every event", sink.forgotten - sink.set_aside)
        found += findings(f"{sink.name} applies every record", _miscounted(seen, sink, records, may_reread=may_reread))
        found += findings(f"{sink.name} has every event once", _not_once(seen, sink))
        for one in sink.comparisons:
            wrong = _wrong(seen, sink, one, may_reread=may_reread)
            found += findings(f"{sink.name} has the {one.name} that its strategy promises", wrong)
    return found


def _due(seen: Seen, sink: Sink, one: ComparedTotals) -> Totals:
    """What a sink that recognises every repeat has to have."""
    if one.adds is None:
        return one.source
    due: dict[str, Decimal] = defaultdict(Decimal)
    for event, number in _counted(seen, sink, one):
        due[event.key] += number
    return due


def _counted(seen: Seen, sink: Sink, one: ComparedTotals) -> Iterator[tuple[TopicEvent, Decimal]]:
    """The events that a comparison is about and that the sink has not set aside, with what they add."""
    for event in seen.firsts.values():
        number = one.added_by(event)
        if number is not None and event.id not in sink.set_aside:
            yield event, number


def _wrong(seen: Seen, sink: Sink, one: ComparedTotals, *, may_reread: bool) -> Iterator[str]:
    due = _due(seen, sink, one)
    for key, difference in _difference(due, one.source).items():
        yield f"{key}: the events on the topics add up to {difference} more than the source has"
    yield from _behind(seen, sink, one)
    promised = _repeated(seen, sink, one, may_reread=may_reread)
    if promised is None:
        return
    found = _difference(one.totals, due)
    for key in (found.keys() | promised.keys()) - seen.foreign_keys:
        if found.get(key, ZERO) != promised.get(key, ZERO):
            yield f"{key}: off by {found.get(key, ZERO)}, and {promised.get(key, ZERO)} was repeated"


def _behind(seen: Seen, sink: Sink, one: ComparedTotals) -> Iterator[str]:
    """The keys whose highest applied version is not that of their last event.

    The sink may have applied later events of the key that the comparison is not about.
    """
    if one.versions is None or one.adds is None:
        return
    counted = _highest(event for event, _ in _counted(seen, sink, one))
    latest = _highest(seen.firsts.values())
    for place, version in counted.items():
        applied = one.versions.get(place[1])
        if applied is None or not version <= applied <= latest[place]:
            yield f"{place[1]}: version {applied} is applied, and {version} is the last"


def _highest(events: Iterable[TopicEvent]) -> dict[tuple[str, str], int]:
    """By topic and key, the highest version."""
    found: dict[tuple[str, str], int] = {}
    for event in events:
        if event.version is not None:
            place = event.topic, event.key
            found[place] = max(event.version, found.get(place, event.version))
    return found


def _repeated(seen: Seen, sink: Sink, one: ComparedTotals, *, may_reread: bool) -> Totals | None:
    """By key, what the repeats have added that the strategy does not recognise; None if nobody knows."""
    if sink.repeats == "all" or one.adds is None:
        return {}
    applied = _applied(seen, sink) if sink.repeats == "none" else None
    if applied is None and sink.repeats == "none" and may_reread:
        return None
    # A sink that does not count has read each record once.
    times: Mapping[str, int] = Counter(event.id for event in seen.events) if applied is None else applied
    repeated: dict[str, Decimal] = defaultdict(Decimal)
    for event, number in _counted(seen, sink, one):
        repeated[event.key] += (max(times.get(event.id, 1), 1) - 1) * number
    return repeated


def _miscounted(seen: Seen, sink: Sink, records: Mapping[str, int], *, may_reread: bool) -> Iterator[str]:
    """The events that a counting sink has not applied once for each record; more often is right if it may re-read. And
    those that it has applied, and that are on no topic.
    """
    applied = _applied(seen, sink)
    if applied is None:
        return
    for event_id, event in seen.firsts.items():
        is_due = _is_due(sink, event)
        times, due = applied.get(event_id, 0), records[event_id] if is_due else 0
        if times < due or (is_due and times > due and not may_reread):
            yield f"{event_id} at {event.place}: applied {times} times, and {due} times on the topic"
    for event_id in applied.keys() - seen.firsts.keys() - {one.event.id for one in seen.foreign}:
        yield f"{event_id}: applied {applied[event_id]} times, and on no topic"


def _not_once(seen: Seen, sink: Sink) -> Iterator[str]:
    """The events that a table of events does not have once; and those that it has, and no topic."""
    if sink.rows is None:
        return
    due = {event.id: event for event in seen.firsts.values() if _is_due(sink, event)}
    for event_id, event in due.items():
        times = sink.rows.get(event_id, 0)
        if times != 1:
            yield f"{event_id} at {event.place}: {times} rows"
    foreign = {one.event.id for one in seen.foreign}
    for event_id in sink.rows.keys() - due.keys() - sink.set_aside - foreign:
        yield f"{event_id}: {sink.rows[event_id]} rows, and no topic has it"


def _is_due(sink: Sink, event: TopicEvent) -> bool:
    """Whether the sink has to have an event: a comparison is about it, and the sink has not set it aside."""
    return event.id not in sink.set_aside and any(one.added_by(event) is not None for one in sink.comparisons)


def _applied(seen: Seen, sink: Sink) -> Mapping[str, int] | None:
    """How often the sink has applied each event of the service: its counts, without foreign events of the same ids."""
    if sink.applied is None:
        return None
    applied = dict(sink.applied)
    for one in seen.foreign:
        if one.event.id in seen.firsts and one.event.id in applied:
            applied[one.event.id] -= round(sink.times(one.event) or 0)
    return applied


def _difference(left: Totals, right: Totals) -> dict[str, Decimal]:
    """By key, what the left has more than the right; only keys that differ."""
    differences = {key: left.get(key, ZERO) - right.get(key, ZERO) for key in left.keys() | right.keys()}
    return {key: difference for key, difference in differences.items() if difference}
