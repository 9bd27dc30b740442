"""`outbox prune` with exactly-once off: it deletes only events that are on the topic, and whose offset is stored."""

from __future__ import annotations

from outbox.base.errors import Failure
from outbox.maintenance.prune import PruneResult, prune
from outbox.relay import slot
from outbox.relay.rest import Rest

from proof.articles.chain import Chain, own_chain
from proof.articles.experiment import Experiment, NotFired, Report, Seen
from proof.articles.history import compare
from proof.articles.writer import writing

EVENTS = 5_000
REFUSE_TIMEOUT_S = 3.0


def pruned(events: int, report: Report) -> Seen:
    """Kill the worker under load, then prune: first while the connector is stopped, then while it runs."""
    with own_chain(report, exactly_once=False) as chain:
        chain.apply(exactly_once_support="requested")
        _kill_under_load(chain, events)
        delivery, written = chain.drained(), chain.written()
        refusal = _refusal(chain)
        kept = len(chain.written())
        result = prune(chain.settings, keep_hours=0, report=report)
        after = compare(written, chain.topic.read())
        left = len(chain.written())
        return Seen(
            f"{delivery}. Connector stopped: {refusal}, {kept:,} rows kept. Connector running: {_asked(result)}; "
            f"{result.deleted:,} rows deleted, {left:,} left; {after.lost:,} lost",
            delivery.is_complete
            and refusal == "marker-not-passed"
            and kept == result.deleted == events
            and left == result.lost.count == result.too_old.count == 0
            and after.is_complete,
        )


def _kill_under_load(chain: Chain, events: int) -> None:
    """Kill the worker when a part of the events is relayed, and start it again while others are written."""
    with writing(chain.settings, events // 2) as writer:
        chain.wait_progress(events // 4)
        writer.allow(events)
        chain.kill_worker()
        chain.stack.up(["connect"], report=chain.report)
        writer.wait_committed(events)


def _refusal(chain: Chain) -> str:
    """The code by which prune refuses while the connector is stopped."""
    rest = Rest(chain.settings)
    rest.stop()
    try:
        prune(chain.settings, keep_hours=0, timeout_s=REFUSE_TIMEOUT_S)
    except Failure as failure:
        return failure.code
    finally:
        rest.resume()
    raise NotFired("prune did not notice that the connector was stopped")


def _asked(result: PruneResult) -> str:
    passed = result.passed
    if passed is None:
        return "it asked nothing"
    return (
        f"its marker at {slot.lsn(passed.marker_lsn)} was passed by the stored offset {slot.lsn(passed.offset_lsn)} "
        f"and the slot {slot.lsn(passed.slot_lsn)}, and {result.found:,} events were found on the topic"
    )


EXPERIMENTS = [
    Experiment(
        "prune-exactly-once-off",
        "worker `disabled`, killed during {events} commits; `outbox prune` while the connector is stopped, and later",
        "it asks for the stored offset, and looks up each event on the topic; then it deletes all, nothing lost",
        EVENTS,
        pruned,
    ),
]
