"""The table of the sink `lakehouse`."""

from __future__ import annotations

import re

from tests.support.events import DECODER
from tests.support.paths import ROOT


def test_the_table_has_the_columns_of_an_event_its_place_and_its_day() -> None:
    column = re.compile(r"^ {4}(\w+) +[A-Z]+ +NOT NULL", re.MULTILINE)
    declared = column.findall((ROOT / "sinks" / "lakehouse" / "table.sql").read_text())
    assert declared == ["event_id", "event_day", "partition", "offset", *(one.name for one in DECODER.columns)]
