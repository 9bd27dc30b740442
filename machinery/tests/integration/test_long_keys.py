"""A key that no index of Postgres takes: an event that has it is set aside, and stops nobody."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from outbox.base.settings import Settings
from outbox.sink.repair.replay import Replayed
from outbox.sink.writer import Counts
from tests.seen import Seen, create_tables
from tests.support.declared import Events, payload
from tests.support.declared_sinks import record

TOPIC = "shop.order"
LONG = Random(24).randbytes(4000).hex()  # noqa: S311 - Postgres cannot compress it into what an index takes


@pytest.mark.parametrize("by", ["dedup", "upsert", "merge", "versions", "offsets"])
def test_an_event_with_a_key_that_no_index_takes_is_set_aside(databases: Settings, tmp_path: Path, by: str) -> None:
    create_tables(databases)
    known = Events(tmp_path / "events").aggregate("order", placed_v1=payload()).load()
    seen = Seen(databases, tmp_path, known, ["order"], by=by)
    good, bad = record("placed", {"id": "a", "number": 1}), record("placed", {"id": LONG, "number": 1})
    assert seen.apply(TOPIC, good, bad) == Counts(rows=1, applied=1, dead=1)
    assert seen.letters("status", "reason", "length(key)") == [("open", "schema violation", len(LONG))]
    assert seen.replay() == Replayed(rejected=1), "it stays as it is"
    assert seen.apply(TOPIC, record("placed", {"id": "a", "number": 2})) == Counts(rows=1, applied=1)
