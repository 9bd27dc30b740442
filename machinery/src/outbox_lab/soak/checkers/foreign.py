"""Foreign events are valid, so a sink that recognises every repeat applies each of them once.

One with the id of an event of the service is a repeat for a strategy that knows ids. It is another event for one that
knows keys and versions, and for one that knows less. The ids of some are older than the deduplication horizon. A
strategy that forgets ids sets them aside.

Each foreign event has a key of its own, so the totals of its key say how often it was applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from math import inf

from outbox.sink.remembering.dead_letters import OLDER_THAN_HORIZON
from outbox_lab.soak.finding import Finding, findings
from outbox_lab.soak.seen import ComparedTotals, Foreign, Seen, Sink

ZERO = Decimal(0)
Times = tuple[int, float]  # how often a sink applies an event: at least, at most


def check(seen: Seen, *, may_reread: bool) -> list[Finding]:
    """Compare the totals of the foreign events' keys with what each strategy promises."""
    found = findings("a foreign event is valid", seen.unreadable)
    for sink in seen.sinks:
        found += findings(f"{sink.name} sets no foreign event aside", _set_aside(sink))
        found += findings(f"{sink.name} applies foreign events as any", _miscounted(seen, sink))
        for one in sink.comparisons:
            wrong = _wrong(seen, sink, one, may_reread=may_reread)
            found += findings(f"{sink.name} has the {one.name} of foreign events that its strategy promises", wrong)
    return found


def times(seen: Seen, sink: Sink, one: Foreign, *, may_reread: bool) -> Times:
    """How often a sink has to apply a foreign event."""
    first = seen.firsts.get(one.event.id)
    is_repeat = first is not None and first.type in sink.types and sink.knows_ids
    if is_repeat or one.event.place in sink.foreign_set_aside:
        return 0, 0
    return 0 if sink.is_based else 1, inf if sink.repeats == "none" and may_reread else 1


def _set_aside(sink: Sink) -> Iterator[str]:
    for place, reason in sink.foreign_set_aside.items():
        if reason != OLDER_THAN_HORIZON or not sink.knows_ids:
            yield f"{place}: {reason}"


def _miscounted(seen: Seen, sink: Sink) -> Iterator[str]:
    """Of a sink that counts, the events whose count is not what their totals say."""
    for one in seen.foreign if sink.applied is not None else ():
        counted, applied = (sink.applied or {}).get(one.event.id, 0), sink.times(one.event)
        if one.event.id not in seen.firsts and applied is not None and applied != counted:
            yield f"{one.event.place}: counted {counted} times, and its total says {applied}"


def _wrong(seen: Seen, sink: Sink, comparison: ComparedTotals, *, may_reread: bool) -> Iterator[str]:
    least, most = dict.fromkeys(seen.foreign_keys, ZERO), dict.fromkeys(seen.foreign_keys, ZERO)
    unknown: set[str] = set()
    for one in seen.foreign:
        key, number = _added(sink, one, comparison)
        if number is None:
            unknown.add(key)
        else:
            bounds = sorted(number and number * Decimal(at) for at in times(seen, sink, one, may_reread=may_reread))
            least[key] += bounds[0]
            most[key] += bounds[1]
    for key in least.keys() - unknown:
        total = comparison.totals.get(key, ZERO)
        if not least[key] <= total <= most[key]:
            yield f"{key}: {total}, and {least[key]} to {most[key]} is right"


def _added(sink: Sink, one: Foreign, comparison: ComparedTotals) -> tuple[str, Decimal | None]:
    """The key of the total that an event adds to, and what it adds; None if nobody says it."""
    if one.event.type not in sink.types:
        return one.event.key, ZERO
    if comparison.adds is not None:
        return one.event.key, comparison.added_by(one.event) or ZERO
    key, number = one.totals.get(comparison.name, (one.event.key, None))
    return key, None if number is None else Decimal(number)
