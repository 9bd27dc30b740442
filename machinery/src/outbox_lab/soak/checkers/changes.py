"""No event without its change, and no change without its events. No change is made twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from http import HTTPStatus

from outbox_lab.soak.domain import Domain
from outbox_lab.soak.finding import Finding, findings
from outbox_lab.soak.seen import Seen, Source


def check(domain: Domain, seen: Seen) -> list[Finding]:
    """Compare the changes that the source has promised, those that it has, and the events on the topics."""
    made = seen.source.changes
    promised = _promised(domain, seen.source)
    events = Counter(domain.change_of_event(event) for event in seen.firsts.values())
    return [
        *findings("a change is made for one key", (change for change, keys in promised.items() if keys > 1)),
        *findings("the source has a change once", seen.source.changed_twice),
        *findings("a change is whole: its answer and its rows", promised.keys() ^ made.keys()),
        *findings("a change has its events, and an event its change", _incomplete(made, events)),
    ]


def _promised(domain: Domain, source: Source) -> Counter[str]:
    successes = (answer for answer in source.answers if answer.status < HTTPStatus.BAD_REQUEST)
    return Counter(domain.change_of_answer(answer.body) for answer in successes)


def _incomplete(made: Mapping[str, int], events: Mapping[str, int]) -> Iterator[str]:
    for change in made.keys() | events.keys():
        if events.get(change, 0) != made.get(change, 0):
            yield f"{change}: {events.get(change, 0)} of {made.get(change, 0)} events"
