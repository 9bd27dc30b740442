"""The sink `turnover`, from the request to the table: each transfer counts once, and no money is forgotten."""

from __future__ import annotations

from decimal import Decimal

from outbox import Settings
from outbox_lab.testing import SinkRole, query, run

from tests.ledger import Client

RATES = {"EUR": ("Europe", "1"), "USD": ("Americas", "0.8639"), "JPY": ("Asia", "0.5524")}
UNKNOWN = "NOK"
AMOUNTS = (500, 701, 11)


def held(settings: Settings) -> dict[str, tuple[object, ...]]:
    """Rows of the sink, by currency."""
    rows = query(
        settings,
        "SELECT currency, min(region), sum(transfers)::int, sum(amount_minor), sum(euro_cents) FROM turnover"
        " WHERE sink = 'turnover' GROUP BY currency",
        SinkRole.AUDITOR,
    )
    return {str(currency): tuple(values) for currency, *values in rows}


def test_each_transfer_counts_once_in_euros_or_is_set_aside(chain: Settings, client: Client) -> None:
    for currency in (*RATES, UNKNOWN):
        account = client.open(currency=currency)
        for amount in AMOUNTS:
            client.fund(account, amount, currency)
    due = {
        currency: (region, len(AMOUNTS), sum(AMOUNTS), sum(round(amount * Decimal(rate)) for amount in AMOUNTS))
        for currency, (region, rate) in RATES.items()
    }
    run(chain, "check", "--wait", "60")
    run(chain, "sink", "turnover", "--until-caught-up")
    assert held(chain) == due
    run(chain, "rewind", "turnover", "--to-earliest", "--yes")
    run(chain, "sink", "turnover", "--until-caught-up")
    assert held(chain) == due
    run(chain, "rebuild", "turnover", "--from", "topic", "--yes")
    assert held(chain) == due
    letters = "SELECT reason, count(*)::int FROM dead_letters WHERE sink = 'turnover' GROUP BY reason"
    assert query(chain, letters, SinkRole.AUDITOR) == [("no rate", len(AMOUNTS))]
