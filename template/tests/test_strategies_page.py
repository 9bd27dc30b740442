"""docs/strategies.md has the strategy of every sink, and every built-in one."""

from __future__ import annotations

import re

from outbox.base import settings
from outbox.sink import discovery
from outbox.sink.remembering import strategy

from template.tests.paths import ROOT


def test_the_table_has_each_strategy() -> None:
    table = (ROOT / "machinery" / "docs" / "strategies.md").read_text()
    known = {one.strategy.name for one in discovery.sinks(settings.load(environment=False)).values()}
    known |= strategy.load(strategy.BUILT_IN).keys()
    known.remove("naive-logged")  # it is `naive`, and counts for the soak
    assert known <= set(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE))
