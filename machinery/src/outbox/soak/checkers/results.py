"""Each sink has what its strategy promises: nothing more, or what was repeated and it does not recognise."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from decimal import Decimal

from outbox.soak.finding import Finding, findings
from outbox.soak.seen import Comparison, Seen, Sink

ZERO = Decimal(0)
Totals = Mapping[str, Decimal]


def check(seen: Seen) -> list[Finding]:
    """Compare every sink with the source and with the events on the topics."""
    found: list[Finding] = []
    for sink in seen.sinks:
        found += findings(f"{sink.name} sets no valid event aside", sink.set_aside)
        found += findings(f"{sink.name} applies every event", _skipped(seen, sink))
        for one in sink.comparisons:
            found += findings(f"{sink.name} has the {one.name} that its strategy promises", _wrong(seen, sink, one))
    return found


def drift(seen: Seen, sink: Sink, one: Comparison) -> dict[str, Decimal]:
    """By key, by how much the sink's total differs from what the events on the topics add."""
    return _difference(one.totals, _due(seen, sink, one))


def _due(seen: Seen, sink: Sink, one: Comparison) -> Totals:
    """What a sink that recognises every repeat has to have."""
    if one.adds is None:
        return one.source
    due: dict[str, Decimal] = defaultdict(Decimal)
    for event in seen.firsts.values():
        if event.id not in sink.set_aside:
            due[event.key] += one.adds.get(event.id, ZERO)
    return due


def _wrong(seen: Seen, sink: Sink, one: Comparison) -> Iterator[str]:
    found, promised = drift(seen, sink, one), _repeated(seen, sink, one)
    if promised is None:
        return
    for key in found.keys() | promised.keys():
        if found.get(key, ZERO) != promised.get(key, ZERO):
            yield f"{key}: off by {found.get(key, ZERO)}, and {promised.get(key, ZERO)} was repeated"
    for key, difference in _difference(_due(seen, sink, one), one.source).items():
        yield f"{key}: the events on the topics add up to {difference} more than the source has"


def _repeated(seen: Seen, sink: Sink, one: Comparison) -> Totals | None:
    """By key, what the repeats have added that the strategy does not recognise; None if nobody knows."""
    if sink.repeats == "all" or one.adds is None:
        return {}
    if sink.repeats == "re-reads":
        times: Mapping[str, int] = Counter(event.id for event in seen.events)
    elif sink.applied is None:
        return None
    else:
        times = sink.applied
    repeated: dict[str, Decimal] = defaultdict(Decimal)
    for event in seen.firsts.values():
        repeated[event.key] += (max(times.get(event.id, 1), 1) - 1) * one.adds.get(event.id, ZERO)
    return repeated


def _skipped(seen: Seen, sink: Sink) -> Iterator[str]:
    if sink.applied is None:
        return
    for event_id, event in seen.firsts.items():
        is_due = any(event_id in (one.adds or {}) for one in sink.comparisons) and event_id not in sink.set_aside
        if is_due and not sink.applied.get(event_id):
            yield f"{event_id} at {event.topic}-{event.partition}@{event.offset}"


def _difference(left: Totals, right: Totals) -> dict[str, Decimal]:
    """By key, what the left has more than the right; only keys that differ."""
    differences = {key: left.get(key, ZERO) - right.get(key, ZERO) for key in left.keys() | right.keys()}
    return {key: difference for key, difference in differences.items() if difference}
