"""Projections that break the contract, each caught by the way of delivery that shows it."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from outbox.base.database import query
from outbox.base.settings import Settings, SinkRole
from outbox.sink import discovery
from outbox_lab.testing.contract.contract import keep

FreshDatabases = Callable[[], AbstractContextManager[Settings]]

SEED = 24
# What the fixture domain does not have.
TABLES = """
CREATE TABLE shared (sink text NOT NULL, item_id uuid PRIMARY KEY, events bigint NOT NULL);
GRANT SELECT, INSERT, UPDATE ON shared TO {writer};
"""
ACTIVITY = "INSERT INTO activity AS stored (sink, aggregate, key, events, kinds) SELECT %(sink)s, 'item', item_id, "
TAKES_EVENTS = "ON CONFLICT (sink, aggregate, key) DO UPDATE SET events = excluded.events"
ADDS_EVENTS = "ON CONFLICT (sink, aggregate, key) DO UPDATE SET events = stored.events + excluded.events"
TAKES_KINDS = "ON CONFLICT (sink, aggregate, key) DO UPDATE SET kinds = excluded.kinds"
NEWEST = "INSERT INTO stock AS stored (sink, item_id, unit, stock, version, events) SELECT DISTINCT ON (item_id) "
TAKES_STATE = """ON CONFLICT (sink, item_id) DO UPDATE
SET unit = excluded.unit, stock = excluded.stock, version = excluded.version"""


class Wrong(NamedTuple):
    """A projection, the ways of delivery that show its mistake, and the table in which they do."""

    sql: str
    ways: str
    table: str = "activity"


IN_BATCHES = "one event per batch|in other batches"
WRONG = {
    "reads the batch": Wrong(
        f"{ACTIVITY} count(*), '{{}}' FROM outbox_batch GROUP BY item_id {ADDS_EVENTS}", "each event twice in a batch"
    ),
    "takes the time of the sink": Wrong(
        f"{ACTIVITY} 0, ARRAY[now()::text] FROM new_events GROUP BY item_id {TAKES_KINDS}", "the same again"
    ),
    "has a key without sink": Wrong(
        """INSERT INTO shared AS stored (sink, item_id, events)
        SELECT %(sink)s, item_id, count(*) FROM new_events GROUP BY item_id
        ON CONFLICT (item_id) DO UPDATE SET events = stored.events + excluded.events""",
        "beside another sink of the job",
        "shared",
    ),
    "takes the offset": Wrong(
        f"{ACTIVITY} max(\"offset\"), '{{}}' FROM new_events GROUP BY item_id {TAKES_EVENTS}", "at other offsets"
    ),
    "takes the first event of a batch": Wrong(
        f"""{NEWEST} %(sink)s, item_id, '', quantity, 0, 0 FROM new_events ORDER BY item_id, version
        ON CONFLICT (sink, item_id) DO UPDATE SET stock = stored.stock + excluded.stock""",
        IN_BATCHES,
        "stock",
    ),
    "replaces a newer state": Wrong(
        f"""{NEWEST} %(sink)s, item_id, unit, stock_after, version, 0 FROM new_events
        ORDER BY item_id, version DESC {TAKES_STATE}""",
        "some as dead letters, then replayed",
        "stock",
    ),
}
WITHOUT_SINK = """
INSERT INTO activity (aggregate, key, events, kinds) SELECT 'item', item_id, 1, '{}' FROM new_events
"""
SEVERAL_ROWS_OF_A_KEY = f"{ACTIVITY} 1, '{{}}' FROM new_events {ADDS_EVENTS}"


def problem(fresh: FreshDatabases, folder: Path, projection: str, shrinking_max: int = 0) -> str:
    """How a sink with this projection breaks the contract."""
    (folder / "wrong.sql").write_text(f"{projection};\n")
    with fresh() as settings:
        query(settings, SinkRole.OWNER, TABLES.format(writer=settings.role_name(SinkRole.WRITER)))
        job = replace(discovery.sinks(settings)["dedup"].job, projections=folder)
        with pytest.raises(AssertionError) as caught:
            keep(settings, discovery.resolve(settings, job), seed=SEED, shrinking_max=shrinking_max)
    return str(caught.value)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_projection_is_named(fresh_databases: FreshDatabases, tmp_path: Path, name: str) -> None:
    wrong = WRONG[name]
    found = problem(fresh_databases, tmp_path, wrong.sql)
    assert re.match(rf"sink dedup, ({wrong.ways}): table {wrong.table}, row .* in the reference", found), found
    assert f"--hypothesis-seed={SEED}" in found


@pytest.mark.parametrize(
    ("projection", "beginning", "detail"),
    [
        (WITHOUT_SINK, "sink dedup: ", 'null value in column "sink" of relation "activity"'),
        (SEVERAL_ROWS_OF_A_KEY, "sink dedup stops at valid events", "cannot affect row a second time"),
    ],
    ids=["a row without the column sink", "two events of a key"],
)
def test_a_projection_that_stops_the_sink_is_named(
    fresh_databases: FreshDatabases, tmp_path: Path, projection: str, beginning: str, detail: str
) -> None:
    found = problem(fresh_databases, tmp_path, projection)
    assert found.startswith(beginning)
    assert detail in found


def test_a_failing_history_is_shrunk(fresh_databases: FreshDatabases, tmp_path: Path) -> None:
    found = problem(fresh_databases, tmp_path, WRONG["takes the first event of a batch"].sql, shrinking_max=200)
    assert len(re.findall(r"^  \d+\. item\.", found, re.MULTILINE)) == 2, found
