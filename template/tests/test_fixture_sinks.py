"""The machinery's tests of `changes` and `lakehouse` on the fixture domain holds for the ledger too.

Its files have the same statements in its own words.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from template.tests.paths import ROOT

DOMAIN = ROOT / "machinery" / "tests" / "domain"

# What the fixture domain calls these words of the ledger. A longer word comes before one that is a part of it.
WORDS = {
    "account_id": "item_id",
    "accounts": "items",
    "balance_minor": "stock",
    "balances": "stock",
    "currency": "unit",
    "amount": "quantity",
    # Its stacks are idle for most of the time, and the work of an idle connector grows with its polls. And a task waits
    # for 10 s before it connects again.
    '"${settings:connector_poll_interval_ms}",': '"250",\n  "retriable.restart.connector.wait.ms": "1000",',
}
FILES = {
    "connect/changes.json": "connect/changes.json",
    "connect/outbox.json": "connect/outbox.json",
    "sinks/changes/strategies/changes.sql": "stock/sinks/changes/strategies/changes.sql",
    "sinks/changes/projections/balances.sql": "stock/sinks/changes/projections/stock.sql",
    "sinks/lakehouse/strategies/lakehouse.sql": "stock/sinks/lakehouse/strategies/lakehouse.sql",
    "sinks/lakehouse/projections/balances.sql": "stock/sinks/lakehouse/projections/stock.sql",
}
COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)


def statements(file: Path) -> str:
    """A file without its comments."""
    return COMMENT.sub("", file.read_text())


@pytest.mark.parametrize(("ours", "theirs"), FILES.items(), ids=FILES)
def test_the_ledger_has_the_tested_statements_in_its_own_words(ours: str, theirs: str) -> None:
    found = statements(ROOT / ours)
    for word, other in WORDS.items():
        found = found.replace(word, other)
    assert found == statements(DOMAIN / theirs)
