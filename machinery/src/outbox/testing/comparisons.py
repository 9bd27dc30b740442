"""The comparisons of a sink, run without Kafka."""

from __future__ import annotations

from contextlib import closing

from outbox.audit import comparison_files
from outbox.audit.totals import Totals, read_totals
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.sink import discovery


def differing_keys(settings: Settings, sink: str) -> dict[str, set[str]]:
    """By comparison of a sink the keys whose totals differ between the source and the sink.

    It is for a sink that has applied every event: `outbox check` also subtracts what a sink has not applied yet. A
    comparison without a section ``[sink]`` is left out. Raises Failure if a comparison cannot be used.
    """
    found = dict[str, set[str]]()
    with closing(connect(settings, SourceRole.AUDITOR)) as source, closing(connect(settings, SinkRole.AUDITOR)) as held:
        for one in comparison_files.load(discovery.chosen(settings, sink)):
            if one.sink is None:
                continue
            due = read_totals(source, one, one.source).get("", Totals()).totals
            has = read_totals(held, one, one.sink, by_sink=True).get(sink, Totals()).totals
            found[one.name] = {key for key in {*due, *has} if due.get(key, 0) != has.get(key, 0)}
    return found
