"""The checkers of sinks: each sink has what its strategy promises, no more than the repeats that it does not recognise.

Totals alone would hide a lost event behind another one of the same size. So the highest version of each key, and the
events that a strategy remembers or counts, are compared too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain

from outbox.base.database import Row
from outbox_lab.soak.record import RunRecord
from outbox_lab.soak.seen import ComparedTotals, Copy, Seen, Sink, TopicEvent

ZERO = Decimal(0)
Totals = Mapping[str, Decimal]


# Events ------------------------------------------------------------------------------------------------------------


def events_set_aside(_: RunRecord, sink: Sink) -> Iterable[str]:
    return sink.set_aside


def forgotten_events(_: RunRecord, sink: Sink) -> Iterable[str]:
    return sink.forgotten - sink.set_aside


def miscounted_events(run: RunRecord, sink: Sink) -> Iterator[str]:
    """The events that a counting sink has not applied once for each record, and those that are on no topic.

    More often is right if it may re-read.
    """
    seen, applied = run.seen, sink.applied
    if applied is None:
        return
    records = Counter(event.id for event in seen.events)
    for event_id, event in seen.firsts.items():
        is_due = _is_due(sink, event)
        times, due = applied.get(event_id, 0), records[event_id] if is_due else 0
        if times < due or (is_due and times > due and not run.may_reread):
            yield f"{event_id} at {event.place}: applied {times} times, and {due} times on the topic"
    for event_id in applied.keys() - seen.firsts.keys():
        yield f"{event_id}: applied {applied[event_id]} times, and on no topic"


def events_not_once(run: RunRecord, sink: Sink) -> Iterator[str]:
    """The events that a sink with a row or an effect for each does not have once; and those of no topic."""
    rows = sink.rows if sink.effects is None else Counter(chain.from_iterable(sink.effects.values()))
    if rows is None:
        return
    due = {event.id: event for event in run.seen.firsts.values() if _is_due(sink, event)}
    for event_id, event in due.items():
        times = rows.get(event_id, 0)
        if times != 1:
            yield f"{event_id} at {event.place}: there {times} times"
    for event_id in rows.keys() - due.keys() - sink.set_aside:
        yield f"{event_id}: there {rows[event_id]} times, and on no topic"


def disordered_effects(run: RunRecord, sink: Sink) -> Iterator[str]:
    """The first effect of each key that is of another key, or stands behind one of a later event."""
    for key, ids in (sink.effects or {}).items():
        before: TopicEvent | None = None
        for event in (run.seen.firsts[event_id] for event_id in ids if event_id in run.seen.firsts):
            if event.key != key or (before is not None and event.rank < before.rank):
                yield f"{key}: {event.id} at {event.place}, behind {before.id if before else 'nothing'}"
                break
            before = event


def _is_due(sink: Sink, event: TopicEvent) -> bool:
    """Whether the sink has to have an event: it is to have an effect, or a comparison is about it; and the sink has not
    set it aside.
    """
    is_asked = event.type in sink.types or any(one.added_by(event) is not None for one in sink.comparisons)
    return is_asked and event.id not in sink.set_aside


def wrong_totals(run: RunRecord, sink: Sink, one: ComparedTotals) -> Iterator[str]:
    """The totals that are not those of the source, or not those with the repeats that the strategy does not recognise.

    And the keys whose highest applied version is not that of their last event.
    """
    seen = run.seen
    due = _due(seen, sink, one)
    for key, difference in _difference(due, one.source).items():
        yield f"{key}: the events on the topics add up to {difference} more than the source has"
    yield from _behind(seen, sink, one)
    promised = _repeated(run, sink, one)
    if promised is None:
        return
    found = _difference(one.totals, due)
    for key in found.keys() | promised.keys():
        if found.get(key, ZERO) != promised.get(key, ZERO):
            yield f"{key}: off by {found.get(key, ZERO)}, and {promised.get(key, ZERO)} was repeated"


def _due(seen: Seen, sink: Sink, one: ComparedTotals) -> Totals:
    """The totals that a sink must have if it recognises every repeat."""
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


def _difference(left: Totals, right: Totals) -> dict[str, Decimal]:
    """By key, what the left has more than the right; only keys that differ."""
    differences = {key: left.get(key, ZERO) - right.get(key, ZERO) for key in left.keys() | right.keys()}
    return {key: difference for key, difference in differences.items() if difference}


def _behind(seen: Seen, sink: Sink, one: ComparedTotals) -> Iterator[str]:
    """The sink may have applied later events of a key that the comparison is not about."""
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


def _repeated(run: RunRecord, sink: Sink, one: ComparedTotals) -> Totals | None:
    """By key, what the repeats have added that the strategy does not recognise; None if nobody knows."""
    if sink.repeats == "all" or one.adds is None:
        return {}
    applied = sink.applied if sink.repeats == "none" else None
    if applied is None and sink.repeats == "none" and run.may_reread:
        return None
    # A sink that does not count has read each record once.
    times: Mapping[str, int] = Counter(event.id for event in run.seen.events) if applied is None else applied
    repeated: dict[str, Decimal] = defaultdict(Decimal)
    for event, number in _counted(run.seen, sink, one):
        repeated[event.key] += (max(times.get(event.id, 1), 1) - 1) * number
    return repeated


# Captured tables ---------------------------------------------------------------------------------------------------


def wrong_rows(copy: Copy) -> Iterator[str]:
    """The rows that a sink of a captured table has otherwise than the source. No fault explains a difference."""
    of_source, of_sink = _by_key(copy.key, copy.source), _by_key(copy.key, copy.rows)
    for key in of_source.keys() | of_sink.keys():
        due, found = of_source.get(key, ()), of_sink.get(key, ())
        if not found:
            yield f"{key}: the sink has no such row"
        elif not due:
            yield f"{key}: the source has no such row"
        elif len(found) != len(due):
            yield f"{key}: {len(found)} rows instead of {len(due)}"
        elif list(found) != list(due):
            yield f"{key}: {_columns(found[0], due[0])}"


def _by_key(key: str, rows: Sequence[Row]) -> Mapping[str, Sequence[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[str(row[key])].append(row)
    return found


def _columns(found: Row, due: Row) -> str:
    names = sorted(name for name in found.keys() | due.keys() if found.get(name) != due.get(name))
    return ", ".join(f"{name} is {found.get(name)} and must be {due.get(name)}" for name in names)
