"""Actions of people on the chain: each does the real thing to the real process, and says what happened and why."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TypeVar

from outbox import Failure
from outbox.dbapi import Event, append
from outbox_lab.walkthrough import Chain, Part, SourceRole, connect, crash_sinks, rewind_sink, terminate_replication

from demo.page.client import Client, write_bad_record

T = TypeVar("T")
Report = Callable[[str], None]

BURST = 100  # transfers
LOAD = 60  # transfers before a fault, and as many while it happens
# What a browser would run if the page wrote it as HTML.
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>'
OPEN_ACCOUNT = (
    "INSERT INTO accounts (id, kind, currency, account_version, created_at) VALUES (%s, 'user', 'EUR', 1, %s)"
)


class Hands:
    """The parts that actions work with."""

    def __init__(self, chain: Chain, right: str, naive: str | None) -> None:
        self.chain = chain
        self.right, self.naive = right, naive

    @cached_property
    def client(self) -> Client:
        """A client of the service, whose address is known once the chain has started."""
        return Client(self.chain.settings)

    @property
    def broker(self) -> Part:
        """Kafka. Raises Failure if its process is out of reach."""
        if self.chain.broker is None:
            raise Failure("Kafka's process is out of reach", code="part-out-of-reach")
        return self.chain.broker

    @property
    def sinks(self) -> list[str]:
        """The sinks that the chain runs."""
        return [name for name in (self.right, self.naive) if name is not None]

    def under_load(self, fault: Callable[[], T]) -> T:
        """Do something amid transfers, and return what it returned once all of them have an answer."""
        self.client.transfers(LOAD)
        failed: list[Failure] = []

        def send() -> None:
            try:
                self.client.transfers(LOAD)
            except Failure as failure:
                failed.append(failure)

        load = threading.Thread(target=send, daemon=True)
        load.start()
        try:
            done = fault()
        finally:
            load.join()
        if failed:
            raise failed[0]
        return done


@dataclass(frozen=True)
class Action:
    """A button. ``do`` returns one or two sentences: what happened, and why."""

    label: str
    hint: str
    group: str  # traffic, relay or sinks
    do: Callable[[Hands, Report], str]
    lacks: Callable[[Hands], str | None] = lambda _: None  # why this chain cannot do it; None if it can


def _transfer(hands: Hands, _: Report) -> str:
    made = hands.client.transfer()
    return (
        f"Transfer {str(made['id'])[:8]} moved {made['amount']} cents. One transaction changed both balances and wrote"
        " two outbox rows, one for each account: both are there, or neither."
    )


def _burst(hands: Hands, _: Report) -> str:
    sent = hands.client.transfers(BURST)
    return f"{sent} transfers, {2 * sent} events. Spark takes what has arrived as one batch, however many they are."


def _bad_record(hands: Hands, _: Report) -> str:
    topic, partition, offset = write_bad_record(hands.chain.settings, HOSTILE)
    return (
        f"Another program wrote a record that breaks the contract to {topic}, partition {partition}, offset {offset}."
        " The sinks set it aside with a reason, in the transaction of its batch, and go on."
    )


def _old_version(hands: Hands, _: Report) -> str:
    account, now = str(uuid.uuid4()), datetime.now(UTC)
    payload = {
        "account_id": account,
        "kind": "user",
        "currency": "EUR",
        "version": 1,
        "occurred_at": now.isoformat().replace("+00:00", "Z"),
    }
    with (
        closing(connect(hands.chain.settings, SourceRole.APP)) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(OPEN_ACCOUNT, [account, now])
        append(connection, Event("account", account, "opened", payload, schema_version=1))
    hands.client.open_account("written by the new release")
    return (
        "Two releases of the service run side by side: one opened an account with account.opened version 1, the other"
        " with version 2, which has a label. A sink turns version 1 into version 2."
    )


def _kill_worker(hands: Hands, report: Report) -> str:
    worker = hands.chain.worker

    def kill() -> int | None:
        pid = worker.pid()
        worker.kill()
        report("the worker is dead; it starts again")
        worker.start()
        return pid

    pid = hands.under_load(kill)
    return (
        f"kill -9 {pid}: the Connect worker died while it relayed, and Debezium reads on from the stored offset. With"
        " exactly-once that was committed with the records; without, it may be older, and events are sent again."
    )


def _terminate_replication(hands: Hands, _: Report) -> str:
    pid = hands.under_load(lambda: terminate_replication(hands.chain.settings))
    return (
        f"Postgres ended server process {pid}, which served Debezium. The slot kept the write-ahead log, so nothing is"
        " lost: Debezium connects again and reads on from what it has confirmed."
    )


def _crash_sinks(hands: Hands, _: Report) -> str:
    def load() -> None:
        hands.client.transfers(BURST)

    crashes = crash_sinks(hands.chain, hands.sinks, load)
    missed = [name for name, crash in crashes.items() if not crash.fired]
    if missed:
        raise Failure(f"the crash missed the window of {', '.join(missed)}: nothing was shown", code="fault-missed")
    batch = ", ".join(f"batch {crash.planned_batch} of {name}" for name, crash in crashes.items())
    return (
        f"The sinks were killed after their database had committed and before Spark noted it: {batch}. Spark repeated"
        " the batch. A sink that remembers event ids skips it; one that does not counts it twice."
    )


def _rewind(number: int) -> Callable[[Hands, Report], str]:
    """Rewind a sink of those that the chain runs."""

    def do(hands: Hands, _: Report) -> str:
        sink = hands.sinks[number]
        records = rewind_sink(hands.chain, sink)
        return (
            f"{sink} was stopped and its offsets were set to the beginning: it reads {records} offsets again. What it"
            " has applied is in its database, so only a strategy that looks there recognises the events."
        )

    return do


def _stop_broker(hands: Hands, _: Report) -> str:
    hands.broker.kill()
    hands.client.transfers(BURST // 10)
    return (
        f"Kafka is dead, and {BURST // 10} transfers were committed all the same: the service needs its database only."
        " Their events wait in the outbox, and the slot keeps the log, until Kafka is back."
    )


def _start_broker(hands: Hands, report: Report) -> str:
    hands.broker.start()
    hands.chain.start(report)
    return "Kafka is back. The connector relays what has waited, in order, and the sinks go on where they stopped."


def _switch(*, exactly_once: bool) -> Callable[[Hands, Report], str]:
    def do(hands: Hands, report: Report) -> str:
        hands.chain.switch(exactly_once=exactly_once, report=report)
        if exactly_once:
            return (
                "Exactly-once is on: Connect commits records and Debezium's offset in one Kafka transaction, and fences"
                " older producers. It ends at Kafka: what a sink does with a record is outside."
            )
        return (
            "Exactly-once is off: records come first, Debezium's offset later. If the worker dies in between, it sends"
            " the same events again."
        )

    return do


def _lacks_broker(hands: Hands) -> str | None:
    return "Kafka's process is out of reach here" if hands.chain.broker is None else None


def _lacks_service_role(hands: Hands) -> str | None:
    """In containers the walkthrough has no password of the service's role."""
    has_it = hands.chain.settings.source_db_app_password.get_secret_value()
    return None if has_it else "The demo cannot log in as the service here"


def _lacks_sink_role(hands: Hands) -> str | None:
    """In containers it has no password of the sinks' role. Docker also starts at once what ends."""
    has_it = hands.chain.settings.sink_db_writer_password.get_secret_value()
    return None if has_it else "The demo cannot log in as a sink here"


def _lacks_naive_sink(hands: Hands) -> str | None:
    return "There is no sink B" if hands.naive is None else _lacks_sink_role(hands)


ACTIONS: dict[str, Action] = {
    "transfer": Action("One transfer", "Two events, one transaction", "traffic", _transfer),
    "burst": Action(f"A burst of {BURST}", f"{2 * BURST} events at once", "traffic", _burst),
    "bad-record": Action("A bad event", "A foreign record breaks the contract", "traffic", _bad_record),
    "old-version": Action(
        "Two versions", "An old and a new release write", "traffic", _old_version, _lacks_service_role
    ),
    "kill-worker": Action("Kill the connector", "kill -9 while it relays", "relay", _kill_worker),
    "cut": Action("Cut replication", "Postgres ends Debezium's connection", "relay", _terminate_replication),
    "stop-kafka": Action("Stop Kafka", "kill -9 of the broker", "relay", _stop_broker, _lacks_broker),
    "start-kafka": Action("Start Kafka", "And everything that fell with it", "relay", _start_broker, _lacks_broker),
    "exactly-once-off": Action("Exactly-once off", "Restarts the worker", "relay", _switch(exactly_once=False)),
    "exactly-once-on": Action("Exactly-once on", "Restarts the worker", "relay", _switch(exactly_once=True)),
    "crash-sinks": Action("Crash the sinks", "Between their commit and Spark's", "sinks", _crash_sinks),
    "rewind-right": Action("Rewind sink A", "It reads every event again", "sinks", _rewind(0), _lacks_sink_role),
    "rewind-naive": Action("Rewind sink B", "It reads every event again", "sinks", _rewind(1), _lacks_naive_sink),
}
