"""How far a sink has drifted from the source, while events are on their way.

A total of a sink can be compared with the source's only where the sink has applied as many events of the key as the
source has written: where the versions are equal. For the other keys the last known drift stays, and they count as
pending, which the page shows beside it. A key that the source does not have drifts by all that the sink has.
"""

from __future__ import annotations

from collections.abc import Mapping

from demo.page.readings import Total

NOTHING = Total(0, 0)


class Drift:
    """The drift of one sink, by key."""

    def __init__(self) -> None:
        self._by_key: dict[str, int] = {}
        self.pending = 0  # keys whose events are not all applied
        self.is_compared = False  # whether there was a comparison

    def compare(self, source: Mapping[str, Total], sink: Mapping[str, Total]) -> None:
        """Compare the totals of two readings, the sink's read before the source's."""
        self.pending = 0
        self.is_compared = True
        for key in source.keys() | sink.keys():
            found, due = sink.get(key, NOTHING), source.get(key)
            if due is None or found.version == due.version:
                self._by_key[key] = found.total - (due or NOTHING).total
            else:
                self.pending += 1

    @property
    def total(self) -> int:
        """The sum of the absolute drifts: opposite ones do not cancel."""
        return sum(map(abs, self._by_key.values()))

    @property
    def keys(self) -> int:
        """How many keys drift."""
        return sum(1 for drift in self._by_key.values() if drift)
