"""A snapshot that is interrupted half-way: it starts again, also with exactly-once, and the sinks get duplicates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial

from confluent_kafka import Message
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox_lab.testing.command import run
from outbox_lab.testing.helpers import query

from proof.articles.chain import OUTBOX, PROGRESS_TIMEOUT_S, Chain, Source, own_chain
from proof.articles.experiment import Experiment, NotFired, Report, Seen
from proof.articles.writer import write

EVENTS = 5_000
# Smaller than ours, so that the snapshot takes many polls, and as many transactions.
BATCH = {"max_batch_size": "64", "max_queue_size": "128"}
ADD_ACCOUNTS = """
INSERT INTO accounts (kind, currency, balance_minor) SELECT 'user', 'EUR', 1 FROM generate_series(1, %s)
"""
TOTAL = "SELECT coalesce(sum(total), 0) FROM sink_totals WHERE sink = %s"


def _account_id(message: Message) -> str:
    return str(json.loads(message.key() or b"{}")["id"])


ACCOUNTS = Source("changes", "SELECT id::text FROM accounts", _account_id)


def interrupted(
    events: int, report: Report, *, source: Source, fill: Callable[[Settings, int], None], repeats: Mapping[str, bool]
) -> Seen:
    """Kill the worker in the midst of the first snapshot, and start it again. ``fill`` writes rows that come to 1 each.

    ``repeats`` says by sink whether it applies a duplicate again.
    """
    with own_chain(report, exactly_once=True, source=source) as chain:
        fill(chain.settings, events)
        before = _interrupt(chain, events)
        chain.stack.up(["connect"], report=report)
        delivery = chain.drained()
        run(chain.settings, "sink", *repeats, "--until-caught-up")
        totals = {name: _total(chain.settings, name) for name in repeats}
        due = {name: events + (delivery.duplicates if repeated else 0) for name, repeated in repeats.items()}
        shown = ", ".join(f"`{name}` {total:,}" for name, total in totals.items())
        return Seen(
            f"worker killed after {before:,} of {events:,} rows; {delivery}; applied in all: {shown}",
            delivery.is_complete and 0 < before <= delivery.duplicates < events and totals == due,
        )


def _interrupt(chain: Chain, events: int) -> int:
    """Kill the worker when a quarter of the rows is on the topic, or soon after. Returns how many were."""
    chain.apply(**BATCH)
    wait_for(
        "a quarter of the snapshot",
        lambda: len(chain.topic.read()) >= events // 4,
        timeout_s=PROGRESS_TIMEOUT_S,
        poll_s=0.01,
    )
    chain.kill_worker()
    rows = len(chain.topic.read())
    if rows >= events:
        raise NotFired(f"all {rows} rows of the snapshot were on the topic before the worker was killed")
    chain.report(f"worker killed after {rows:,} rows")
    return rows


def _total(settings: Settings, sink: str) -> int:
    ((total,),) = query(settings, TOTAL, SinkRole.AUDITOR, [sink])
    return int(total)


def _add_accounts(settings: Settings, number: int) -> None:
    query(settings, ADD_ACCOUNTS, parameters=[number])


DONE = "exactly-once `required`; the worker is killed in the first snapshot of {events} rows, and started again"
EXPERIMENTS = [
    Experiment(
        "snapshot-of-outbox",
        DONE,
        "it starts again: duplicates, nothing lost; `balances` skips them, `balances-naive` does not",
        EVENTS,
        partial(interrupted, source=OUTBOX, fill=write, repeats={"balances": False, "balances-naive": True}),
    ),
    Experiment(
        "snapshot-of-table",
        f"{DONE}; connector and sink `changes`",
        "it starts again: duplicates, nothing lost; `changes` has each row's state once",
        EVENTS,
        partial(interrupted, source=ACCOUNTS, fill=_add_accounts, repeats={"changes": False}),
    ),
]
