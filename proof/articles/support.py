"""A worker without `exactly.once.source.support`: it refuses a connector that requires exactly-once."""

from __future__ import annotations

import requests

from proof.articles.chain import Refusal, own_chain, put_config
from proof.articles.experiment import Experiment, Report, Seen
from proof.articles.writer import write

EVENTS = 1_000


def refused(events: int, report: Report) -> Seen:
    """Connect refuses `required`, takes `requested`, and then relays at least once."""
    with own_chain(report, exactly_once=False) as chain:
        required = chain.config(exactly_once_support="required")
        refusal = Refusal(put_config(chain.settings, chain.connector, required))
        chain.apply(exactly_once_support="requested")
        write(chain.settings, events)
        delivery, mode = chain.drained(), chain.mode()
        return Seen(
            f"`required`: {refusal} `requested`: {mode}; {delivery}",
            refusal.status == requests.codes.bad_request and mode.startswith("at-least-once") and delivery.is_complete,
        )


EXPERIMENTS = [
    Experiment(
        "worker-without-support",
        "worker `disabled`; a connector is created with `required`, then with `requested`; {events} commits",
        "HTTP 400 to `required`; `requested` relays, at least once",
        EVENTS,
        refused,
    ),
]
