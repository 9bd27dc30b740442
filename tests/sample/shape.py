"""The ledger's event."""

from __future__ import annotations

from tests.support.shape import Shape

SHAPE = Shape(
    aggregatetype="balance",
    type_less="debited",
    type_more="credited",
    reference="transfer_id",
    key="account_id",
    quantity="amount",
    unit="currency",
    total_after="balance_after",
    units=("EUR", "USD"),
)
