"""Apply a Debezium connector to Kafka Connect, report its status, remove it; the outbox's connector by default.

Applying is idempotent. It first checks what Debezium does not check (`outbox.relay.slot`): that Debezium gets the
whole table, and that the replication slot belongs to the stored offset.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.kafka import topics
from outbox.relay import connectors, offsets, slot
from outbox.relay.connectors import Connector
from outbox.relay.rest import START_TIMEOUT_S, Rest, State


@dataclass(frozen=True)
class Status(State):
    """The state of a connector, and the effective exactly-once mode."""

    worker_exactly_once: bool | None = None  # None: unknown
    connector_exactly_once: str | None = None  # required or requested
    transaction_boundary: str | None = None

    @property
    def mode(self) -> str:
        """The effective delivery between Debezium and Kafka."""
        if self.connector == "MISSING":
            return "none"
        match self.worker_exactly_once:
            case None:
                return "unknown"
            case True:
                return f"exactly-once (transaction boundary {self.transaction_boundary})"
        return "at-least-once"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mode": self.mode}


def apply(settings: Settings, connector: Connector | None = None, on_release: Callable[[], None] = lambda: None) -> str:
    """Make the connector run as its file says. Return what was done: created, updated, restarted or unchanged.

    ``on_release`` is called if a hanging transaction was ended: its events are sent again (`outbox.relay.offsets`).
    It is called at once, because what follows may fail.

    Creates the topics first, because a record without its topic stops the task: it waits for the topic for good, and
    its state is RUNNING. For a captured table it creates the publication too. Raises Failure if Debezium
    would not get the whole table, a topic has fewer partitions than declared, the slot cannot be trusted, Connect
    refuses the configuration, or the task fails.
    """
    connector = connector or connectors.load(settings)
    rest = Rest(settings, connector)
    if not connector.is_outbox:
        slot.publish(settings, connector)
    slot.require_whole_table(settings, connector)
    topics.create(settings, connectors.topic_specs(settings, connector))
    requested, effective = connector.config, rest.config()
    # Connect returns no offsets while a transaction hangs on them.
    is_released = offsets.end_hanging(settings, connector, on_release)
    if effective is None:
        # Connect keeps the offsets of a removed connector, and returns them only for an existing one.
        effective = rest.create_stopped(requested)
    slot.require_continuity(settings, rest.offset, connector, effective)
    if effective is None:
        done = "created"
    elif effective != {**requested, "name": connector.name}:
        rest.stop()  # else Connect reports the state of the old task for a while
        try:
            rest.put_config(requested)
        except Failure:
            rest.resume()  # refused: it continues as before
            raise
        done = "updated"
    elif is_released or rest.state().error or rest.state().is_unassigned:
        rest.stop()
        done = "restarted"
    else:
        done = "unchanged"
    rest.resume()
    _wait_running(connector, rest)
    return done


def status(settings: Settings, connector: Connector | None = None) -> Status:
    connector = connector or connectors.load(settings)
    rest = Rest(settings, connector)
    state = rest.state()
    config = rest.config() or {}
    return Status(
        connector=state.connector,
        tasks=state.tasks,
        error=state.error,
        worker_exactly_once=rest.worker_exactly_once(connector.config),
        connector_exactly_once=config.get("exactly.once.support"),
        transaction_boundary=config.get("transaction.boundary"),
    )


def disable_exactly_once(settings: Settings) -> None:
    """Stop requiring exactly-once in every existing connector.

    This is the first step of switching it off: on a worker without exactly-once, a connector that requires it fails.
    """
    for kind in connectors.kinds():
        rest = Rest(settings, connectors.load(settings, kind))
        effective = rest.config()
        if effective is not None and effective.get("exactly.once.support") != "requested":
            rest.put_config({**effective, "exactly.once.support": "requested"})


def remove(settings: Settings, connector: Connector | None = None, *, drop_slot: bool = False) -> bool:
    """Remove the connector; False if there was none.

    Its slot and its offsets stay, so that ``apply`` continues there; until then the slot retains the write-ahead log.
    A transaction that its task has left open on the offsets topic is aborted. ``drop_slot`` removes slot, offsets and
    what `apply` created in the database. The next ``apply`` then starts with a snapshot of the whole table. An
    interrupted removal can be repeated.
    """
    connector = connector or connectors.load(settings)
    rest = Rest(settings, connector)
    existed = rest.config() is not None
    if drop_slot:
        offsets.require_topic(settings)
    if existed:
        rest.delete()
    offsets.end_left_open(settings, connector)  # else the next `apply` waits a minute for it
    if drop_slot:
        slot.drop(settings, connector)  # first, because it waits until the connector's task has released the slot
        offsets.delete(settings, connector)
        if not connector.is_outbox:
            slot.unpublish(settings, connector)
    return existed


def _wait_running(connector: Connector, rest: Rest) -> None:
    def running_or_failed() -> State | None:
        state = rest.state()
        return state if state.is_running or state.error else None

    try:
        state = wait_for("the connector's task to run", running_or_failed, timeout_s=START_TIMEOUT_S, poll_s=0.1)
    except WaitTimeoutError as error:
        remedy = f"see `{connector.command('status')}` and the worker's log"
        raise Failure(str(error), remedy, code="connector-not-running") from None
    if failure := failure_of(connector, state):
        raise failure


def released(connector: Connector) -> str:
    """Message to an operator when a hanging transaction was ended."""
    return f"connector {connector.name}: a transaction was hanging; it is ended, and its events are sent again"


def failure_of(connector: Connector, state: State) -> Failure | None:
    """Why a connector relays nothing; None if it runs."""
    apply = f"`{connector.command('apply')}`"
    if state.error:
        message, remedy = f"failed: {state.error}", f"fix the cause, then {apply} restarts it"
        return Failure(f"connector {connector.name} {message}", remedy, code="connector-failed")
    if not state.is_running:
        message = f"is {state.connector}, its tasks {', '.join(state.tasks) or 'none'}"
        return Failure(f"connector {connector.name} {message}", apply, code="connector-not-running")
    return None
