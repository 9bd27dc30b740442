"""The table of the sink `lakehouse`."""

from __future__ import annotations

import re

from outbox.base.settings import load
from outbox.sink import spec
from tests.support.paths import ROOT

COLUMN = re.compile(r"^ {4}(\w+) +[A-Z]+", re.MULTILINE)


def test_the_table_has_the_columns_of_its_events_their_place_and_their_day() -> None:
    declared = COLUMN.findall((ROOT / "sinks" / "lakehouse" / "table.sql").read_text())
    columns = spec.sinks(load(environment=False))["lakehouse"].layout.columns
    assert declared == ["event_id", "event_day", "partition", "offset", *(column.name for column in columns)]
