"""The transform of the sink `turnover`, as a project tests its own: without Kafka and without a database."""

from __future__ import annotations

import shutil
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from outbox import load_settings
from outbox_lab.testing import check_transform, example_events

from sinks.turnover import transform
from sinks.turnover.transform import in_euros

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = load_settings(environment=False)
EVENT = "balance.credited"
EXAMPLE = {
    "transfer_id": "6f1f3c6e-0f53-4d0b-9b0e-0d2c6a3a7c11",
    "account_id": "01a1fc75-167d-7239-af57-d1ee1a62e0a6",
    "amount": 1250,
    "currency": "EUR",
    "balance_after": 8750,
    "version": 2,
    "occurred_at": "2026-11-21T23:59:59.999999Z",
}


def rows(spark: SparkSession, *changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that the transform returns for the example with these changes, after the rules are checked."""
    payloads = {EVENT: [EXAMPLE | change for change in changes]}
    events = example_events(spark, SETTINGS, [EVENT], payloads, count=len(changes))
    return check_transform(in_euros, events)


def test_it_keeps_the_rules(spark: SparkSession) -> None:
    assert len(check_transform(in_euros, example_events(spark, SETTINGS, [EVENT]))) == 60


@pytest.mark.parametrize("amount", [1, 3, 1250, 2**63 - 1])
def test_amounts_are_exact_and_rounded_half_to_even(spark: SparkSession, amount: int) -> None:
    rates = {"EUR": "1", "USD": "0.8639", "JPY": "0.5524", "INR": "0.00968"}
    found = rows(spark, *({"currency": one, "amount": amount} for one in rates))
    assert [row["euro_cents"] for row in found] == [
        (amount * Decimal(rate)).quantize(Decimal(1)) for rate in rates.values()
    ]
    assert [row["region"] for row in found] == ["Europe", "Americas", "Asia", "Asia"]
    assert {str(row["day"]) for row in found} == {"2026-11-21"}


def test_an_event_without_a_rate_is_kept_without_euros(spark: SparkSession) -> None:
    [row] = rows(spark, {"currency": "XXX"})
    assert (row["currency"], row["amount"], row["region"], row["euro_cents"]) == ("XXX", 1250, None, None)


def test_the_project_may_be_in_a_folder_with_a_space(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my project"
    folder.mkdir()
    monkeypatch.setattr(transform, "FILE", Path(shutil.copy(transform.FILE, folder)))
    assert [row["region"] for row in rows(spark, {})] == ["Europe"]
