"""docs/strategies.md has every strategy."""

from __future__ import annotations

import re

from outbox.base import settings
from outbox.sink import spec
from tests.support.paths import ROOT


def test_the_table_has_each_strategy() -> None:
    table = (ROOT / "docs" / "strategies.md").read_text()
    known = spec.sinks(settings.load(environment=False))
    assert set(known) <= set(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE))
