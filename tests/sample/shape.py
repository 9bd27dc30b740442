"""The ledger's event."""

from __future__ import annotations

from tests.support.paths import ROOT
from tests.support.shape import Shape

SHAPE = Shape(
    schema_file=ROOT / "connect" / "events" / "ledger-event.v1.schema.json",
    aggregatetype="account",
    type_less="transfer.debited",
    type_more="transfer.credited",
    reference="transfer_id",
    key="account_id",
    quantity="amount",
    unit="currency",
    total_after="balance_after",
    units=("EUR", "USD"),
)
