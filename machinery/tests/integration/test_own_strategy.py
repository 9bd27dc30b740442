"""A strategy of the adopter's own, with a memory of its own: retention and rebuilds treat it as they treat ours."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.kafka.topics import Topic
from outbox.maintenance import retention
from outbox.sink import discovery
from outbox.sink.remembering import strategy
from outbox.sink.remembering.strategy import Strategy
from outbox.sink.repair import rebuild
from outbox.sink.writer import Counts
from tests.support import kept_rows
from tests.support.kept_rows import ago
from tests.support.made_events import DAY_MS, JOB, NOW_MS, TOPIC, TOPIC_ID, Event, batch, nth_key, uuid7
from tests.support.sink_driver import sink_on

RANDOM = Random(11)  # noqa: S311
IDS = """
CREATE TABLE my_ids (sink text, event_id uuid, PRIMARY KEY (sink, event_id));
GRANT SELECT, INSERT ON my_ids TO {writer};
GRANT SELECT, DELETE ON my_ids TO {pruner};
"""
HERE, WHOLE = [Topic(TOPIC, TOPIC_ID, 1)], {TOPIC: {0: 0}}
OURS = strategy.BUILT_IN / "dedup.sql"


def aged(days: int) -> Event:
    return Event(uuid7(RANDOM, NOW_MS - days * DAY_MS), nth_key(1), 1, days)


@pytest.fixture(params=["processed_events", "my_ids"])
def own(
    databases: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Strategy:
    """A strategy in a file of the project, which has a sink with it. It remembers ids in our table, or in its own."""
    roles = {
        name: databases.role_name(role) for name, role in (("writer", SinkRole.WRITER), ("pruner", SinkRole.PRUNER))
    }
    kept_rows.query(databases, IDS.format(**roles))
    file = tmp_path / "mine.sql"
    file.write_text(OURS.read_text().replace("processed_events", request.param))
    monkeypatch.setattr(discovery, "jobs", lambda _: [replace(JOB, name="mine", strategy=file)])
    return strategy.find(file)


def remembered(settings: Settings, own: Strategy) -> set[str]:
    assert own.memory is not None
    return {str(one) for (one,) in kept_rows.query(settings, f"SELECT event_id FROM {own.memory.table}")}


def test_what_it_remembers_is_forgotten_below_the_horizon_and_kept_above(databases: Settings, own: Strategy) -> None:
    # A partition has up to a month of ids: the one of the oldest event ends below the horizon whatever the date is.
    far, near, young = events = [aged(140), aged(99), aged(3)]
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        sink = sink_on(connection, own)
        assert sink.apply(batch(events)) == Counts(rows=3, applied=3)
        retention.drop(databases, ago(100))
        retention.delete_rows(databases, kept_rows.horizon(databases))
        left = remembered(databases, own)
        assert (far.event_id in left, {near.event_id, young.event_id} <= left) == (False, True)
        assert sink.apply(batch(events, start=3)) == Counts(rows=3, duplicates=2, rejected=1)


def test_a_rebuild_brings_a_memory_that_knows_each_event(databases: Settings, own: Strategy) -> None:
    events, later = [aged(5), aged(4)], aged(3)
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        sink_on(connection, own).apply(batch(events))
    with rebuild.reserved(databases, "mine") as owner:
        rebuild.begin(owner, "mine", HERE, WHOLE)
        with closing(connect(databases, SinkRole.WRITER)) as connection:
            sink_on(connection, own, name=rebuild.copy_of("mine")).apply(batch([*events, later]))
        rebuild.swap(owner, "mine", HERE, WHOLE)
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        assert sink_on(connection, own).apply(batch([*events, later], start=3)) == Counts(rows=3, duplicates=3)
