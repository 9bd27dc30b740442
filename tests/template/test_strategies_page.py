"""docs/strategies.md has every strategy."""

from __future__ import annotations

import re

from outbox.base import settings
from outbox.sink import job
from tests.support.paths import ROOT


def test_the_documented_table_has_each_of_them() -> None:
    table = (ROOT / "docs" / "strategies.md").read_text()
    known = job.sinks(settings.load(environment=False))
    assert sorted(re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE)) == sorted(known)
