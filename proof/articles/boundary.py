"""Where Connect ends a transaction: `transaction.boundary`."""

from __future__ import annotations

import time

import requests

from proof.articles.chain import REQUEST_TIMEOUT_S, Refusal, own_chain, put_config
from proof.articles.experiment import Experiment, Report, Seen
from proof.articles.writer import write

EVENTS = 5_000
INTERVAL_MS = 1_000
SLACK = 2  # transactions: the one under way at the beginning, and the one at the end


def poll(events: int, report: Report) -> Seen:
    """A transaction for each poll of the connector: several a second."""
    transactions, elapsed_s, text = _relay(events, report, transaction_boundary="poll")
    return Seen(text, transactions > elapsed_s * 1000 / INTERVAL_MS + SLACK)


def interval(events: int, report: Report) -> Seen:
    """A transaction for each interval."""
    transactions, elapsed_s, text = _relay(
        events, report, transaction_boundary="interval", transaction_boundary_interval_ms=str(INTERVAL_MS)
    )
    return Seen(text, 0 < transactions <= elapsed_s * 1000 / INTERVAL_MS + SLACK)


def _relay(events: int, report: Report, **boundary: str) -> tuple[int, float, str]:
    """Relay events of one partition, where each transaction leaves one marker. Returns transactions, time, and a text.

    No transaction is counted if an event is lost or comes twice: that is never as expected.
    """
    with own_chain(report, exactly_once=True) as chain:
        chain.apply(**boundary)
        began = time.monotonic()
        write(chain.settings, events, accounts=1)
        delivery = chain.drained()
        elapsed_s = time.monotonic() - began
        transactions = chain.topic.offsets - delivery.records
        text = f"{chain.mode()}; {delivery}; {transactions:,} transactions in {elapsed_s:.1f} s"
        return (transactions if delivery.is_exactly_once else 0), elapsed_s, text


def connector(events: int, report: Report) -> Seen:
    """The connector itself would have to define the boundaries, and Debezium's for Postgres does not."""
    del events
    with own_chain(report, exactly_once=True) as chain:
        refusal = Refusal(put_config(chain.settings, chain.connector, chain.config(transaction_boundary="connector")))
        url, login = f"{chain.settings.connect_url}/connectors", chain.settings.connect_login
        existing = requests.get(url, auth=login, timeout=REQUEST_TIMEOUT_S).json()
        return Seen(str(refusal), refusal.status == requests.codes.bad_request and existing == [])


EXPERIMENTS = [
    Experiment(
        "boundary-poll",
        "{events} single-row commits on one partition; `transaction.boundary=poll`",
        f"no duplicates; more transactions than one every {INTERVAL_MS:,} ms",
        EVENTS,
        poll,
    ),
    Experiment(
        "boundary-interval",
        f"the same; `transaction.boundary=interval`, `transaction.boundary.interval.ms={INTERVAL_MS}`",
        f"no duplicates; at most one transaction every {INTERVAL_MS:,} ms",
        EVENTS,
        interval,
    ),
    Experiment(
        "boundary-connector",
        "a connector is created with `transaction.boundary=connector`",
        "HTTP 400, and no connector",
        0,
        connector,
    ),
]
