"""`outbox prune` with exactly-once off: it deletes only events that are on the topic."""

from __future__ import annotations

from outbox.maintenance.prune import PruneResult, prune
from outbox.relay.rest import Rest

from proof.articles.chain import Chain, own_chain
from proof.articles.experiment import Experiment, Report, Seen
from proof.articles.history import compare
from proof.articles.writer import writing

EVENTS = 5_000
HELD_EVENTS = 100


def pruned(events: int, report: Report) -> Seen:
    """Kill the worker under load, then prune: first with events behind a stopped connector, then while it runs."""
    with own_chain(report, exactly_once=False) as chain:
        chain.apply(exactly_once_support="requested")
        _kill_under_load(chain, events)
        delivery, written = chain.drained(), chain.written()
        rest = Rest(chain.settings)
        rest.stop()
        with writing(chain.settings, HELD_EVENTS) as writer:
            writer.wait_committed(HELD_EVENTS)
        stopped = prune(chain.settings, keep_hours=0, report=report)
        held = chain.written()
        rest.resume()
        chain.drained()
        running = prune(chain.settings, keep_hours=0, report=report)
        after, left = compare([*written, *held], chain.topic.read()), len(chain.written())
        return Seen(
            f"{delivery}. Connector stopped: {stopped.deleted:,} rows deleted, {len(held):,} kept. Connector running: "
            f"{running.deleted:,} rows deleted, {left:,} left; {after.lost:,} lost",
            delivery.is_complete
            and stopped == PruneResult(deleted=events, on_their_way=HELD_EVENTS)
            and running == PruneResult(deleted=HELD_EVENTS)
            and left == 0
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


EXPERIMENTS = [
    Experiment(
        "prune-exactly-once-off",
        "worker `disabled`, killed during {events} commits; `outbox prune` while the connector is stopped, and later",
        "it deletes what it finds on the topic, and the rest once that is relayed; nothing lost",
        EVENTS,
        pruned,
    ),
]
