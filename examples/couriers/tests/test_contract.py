"""Both sinks in every way of delivery, on a real Cassandra."""

from __future__ import annotations

import pytest
from cassandra.cluster import Session
from outbox_lab.testing.contract import contract

from sinks.couriers import target as couriers
from sinks.zones import target as zones


@pytest.fixture(autouse=True)
def emptied(tables: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tables be emptied without a tombstone: it would hide the versions that come again."""

    def truncate(key: str, topic: str, *, dry_run: bool) -> int:
        del key, topic, dry_run
        for module, table in ((couriers, "couriers"), (zones, "couriers_by_zone")):
            if any(module.totals()):
                tables.execute(f"TRUNCATE delivery.{table}")
        return 1

    for module in (couriers, zones):
        monkeypatch.setattr(module, "erase", truncate)


test_sinks_keep_their_contract = contract(begins=["courier.moved"], examples=2)
