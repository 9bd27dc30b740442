"""The table of the sink `lakehouse`."""

from __future__ import annotations

import re

from tests.support import events as made


def test_the_lakehouse_has_the_columns_of_an_event_and_its_day() -> None:
    column = re.compile(r'^ *"?(\w+)"? +[A-Za-z]+ +NOT NULL', re.MULTILINE)
    staged, table = (column.findall((made.SINKS / file).read_text()) for file in ("staged.sql", "lakehouse/table.sql"))
    assert len(staged) == 9
    assert [name for name in table if name != "event_day"] == staged
