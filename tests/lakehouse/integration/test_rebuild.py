"""A table of events is not rebuilt."""

from __future__ import annotations

import pytest
from outbox.base.settings import Settings
from outbox.testing.command import outbox

from tests.support.sink_driver import Database


@pytest.mark.parametrize("source", ["topic", "source"])
def test_a_table_of_events_is_not_rebuilt(databases: Settings, source: str) -> None:
    done = outbox("rebuild", "lakehouse", "--from", source, "--yes", home=databases.home, **databases.as_env())
    assert done.returncode == 1
    assert "there is nothing to recompute — `outbox rewind lakehouse --to-earliest`" in done.stderr
    assert Database(databases, "lakehouse").totals() == {}
