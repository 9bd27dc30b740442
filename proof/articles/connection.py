"""Commits of one row each while Debezium's replication connection is terminated: what comes twice, and what is lost."""

from __future__ import annotations

from functools import partial

from proof.articles.chain import Chain, own_chain
from proof.articles.experiment import Experiment, Report, Seen
from proof.articles.writer import Writer, writing

EVENTS = 50_000
TERMINATIONS = 3
PROGRESS = 300  # events that a connection has relayed before it is terminated


def terminated(events: int, report: Report, *, exactly_once: bool, support: str) -> Seen:
    """Terminate the connection several times, each time in the midst of the commits.

    Duplicates are expected without exactly-once, and with it none, whether the connector requires or requests it.
    """
    with own_chain(report, exactly_once=exactly_once) as chain:
        chain.apply(exactly_once_support=support)
        fired = _terminate_under_load(chain, events)
        delivery = chain.drained()
        markers = chain.topic.offsets - delivery.records
        is_expected = delivery.is_exactly_once if exactly_once else delivery.is_complete and delivery.duplicates > 0
        return Seen(
            f"{fired}; {delivery}; {markers:,} more offsets are markers of transactions",
            is_expected and (markers > 0) is exactly_once,
        )


def _terminate_under_load(chain: Chain, events: int) -> str:
    """Write the events, and terminate the connection in between. Returns when that was.

    The commits are cut into slices. A termination falls into each slice but the first and the last: the connection has
    relayed something before, and events on every partition follow the last one, behind which nothing can be repeated.
    """
    size = events // (TERMINATIONS + 2)
    fired = []
    with writing(chain.settings, size) as writer:
        for number in range(1, TERMINATIONS + 1):
            writer.allow(size * (number + 1))
            writer.wait_committed(size * number)
            fired.append(_terminate(chain, writer, min(PROGRESS, size // 2)))
        writer.allow(events)
        writer.wait_committed(events)
    return "terminated " + ", ".join(fired)


def _terminate(chain: Chain, writer: Writer, progress: int) -> str:
    chain.wait_progress(progress)
    committed = writer.committed
    backend = chain.terminate_replication()
    chain.report(f"backend {backend} terminated after {committed:,} commits, and another one has the slot")
    return f"backend {backend} after {committed:,} commits"


DONE = f"{{events}} single-row commits; `pg_terminate_backend` on the replication connection, {TERMINATIONS} times"
NO_DUPLICATES = "nothing lost, no duplicates"
EXPERIMENTS = [
    Experiment(
        "connection-terminated-off",
        f"{DONE}; worker `disabled`",
        "nothing lost, duplicates",
        EVENTS,
        partial(terminated, exactly_once=False, support="requested"),
    ),
    Experiment(
        "connection-terminated-requested",
        f"{DONE}; worker `enabled`, connector `requested`",
        NO_DUPLICATES,
        EVENTS,
        partial(terminated, exactly_once=True, support="requested"),
    ),
    Experiment(
        "connection-terminated-required",
        f"{DONE}; worker `enabled`, connector `required`",
        NO_DUPLICATES,
        EVENTS,
        partial(terminated, exactly_once=True, support="required"),
    ),
]
