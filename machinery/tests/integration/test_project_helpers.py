"""Helpers of `outbox_lab.testing` for a project's tests: comparisons and rebuilds without Kafka."""

from __future__ import annotations

from random import Random

from outbox.base.settings import Settings, SinkRole
from outbox_lab.testing import deliver, differing_keys, outbox_records, query, rebuild
from tests.lake import write_source
from tests.support.made_events import Event, nth_key, uuid7

RANDOM = Random(32)  # noqa: S311


def test_a_wrong_total_is_found_and_rebuilt(databases: Settings) -> None:
    write_source(databases, [Event(uuid7(RANDOM), nth_key(number), 3, 1) for number in range(2)])
    assert differing_keys(databases, "dedup") == {"stock": {nth_key(0), nth_key(1)}}, "nothing is applied"
    deliver(databases, outbox_records(databases), "dedup")
    assert differing_keys(databases, "dedup") == {"stock": set()}
    query(databases, f"UPDATE stock SET stock = 5 WHERE item_id = '{nth_key(1)}'", SinkRole.OWNER)
    assert differing_keys(databases, "dedup") == {"stock": {nth_key(1)}}
    assert rebuild(databases, "dedup") == {nth_key(1): -2}
    assert differing_keys(databases, "dedup") == {"stock": set()}
