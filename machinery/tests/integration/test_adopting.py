"""The SQL in the reference of docs/adopting.md, taken from there and run."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random
from textwrap import dedent

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink import strategy
from outbox.sink.writer import Counts
from tests.support.made_events import NOW_MS, Event, batch, nth_key, uuid7
from tests.support.paths import ROOT
from tests.support.sink_driver import Database, projections_in, sink_on

PAGE = ROOT.parent / "docs" / "adopting.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="docs/adopting.md is deleted")
RANDOM = Random(6)  # noqa: S311
EVENTS = [Event(uuid7(RANDOM, NOW_MS + number), nth_key(number % 2), 1, number // 2 + 1) for number in range(6)]


def shown(beginning: str) -> str:
    """The one block of the page that begins so."""
    blocks = [dedent(block) for block in re.findall(r"(?:^ {4}.*\n)+", PAGE.read_text(), re.MULTILINE)]
    (block,) = [block for block in blocks if block.startswith(beginning)]
    return block


def test_the_projection_counts_each_event_once(databases: Settings, tmp_path: Path) -> None:
    projections = projections_in(tmp_path, shown("INSERT INTO events_a_day"), "events_a_day")
    with closing(connect(databases, SinkRole.OWNER)) as owner, owner, owner.cursor() as cursor:
        cursor.execute(shown("CREATE TABLE events_a_day").replace("{writer}", databases.role_name(SinkRole.WRITER)))
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        sink = sink_on(connection, projections=projections)
        sink.apply(batch(EVENTS[:4]))
        sink.apply(batch(EVENTS[2:], start=4))
    ((counted,),) = Database(databases).query("SELECT sum(events) FROM events_a_day")
    assert int(str(counted)) == len(EVENTS)


def test_the_strategy_is_one_file(databases: Settings, tmp_path: Path) -> None:
    (tmp_path / "young.sql").write_text(shown("-- idea: new is what is younger"))
    young = strategy.load(tmp_path)["young"]
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        sink = sink_on(connection, young)
        assert sink.apply(batch(EVENTS)) == Counts(rows=6, applied=6)
        old = batch(EVENTS[:1], start=6)
        [(name, table)] = old.rows.items()
        two_hours_ago = pc.subtract(table["occurred_at"], pa.scalar(timedelta(hours=2)))
        place = table.column_names.index("occurred_at")
        old = replace(old, rows={name: table.set_column(place, "occurred_at", two_hours_ago)})
        assert sink.apply(old) == Counts(rows=1, duplicates=1)
