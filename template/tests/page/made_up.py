"""The page on a made-up chain, to look at layouts: `python -m template.tests.page.made_up [PORT]`. It tests nothing.

With a second argument it goes on. The same seed makes the same pictures. Five minutes have passed: no fault, a worker
killed without exactly-once, the same with it, and the sinks killed between their commits.
"""

from __future__ import annotations

import random
import secrets
import sys
import threading
import uuid
from decimal import Decimal
from typing import Any

from outbox_lab.walkthrough import Phase

from demo.page.actions import ACTIONS, HOSTILE
from demo.page.app import Desk, Server, create_app
from demo.page.hub import Hub
from demo.page.lesson import QUESTIONS
from demo.page.player import LOGS, TABLES
from demo.page.probe import now_ms
from demo.page.readings import Batch, Connector, Down, OutboxRow, Readings, Record, Sink, Slot, Source, Topics, Total
from demo.page.security import Guard
from demo.page.state import State

TITLES = (
    "The chain: service → Postgres → Debezium → Kafka → PySpark sinks",
    "1. No faults",
    "2. Exactly-once off; the Connect worker is killed (kill -9) while it relays",
    "3. Exactly-once on; the worker is killed again",
    "4. Exactly-once still on; the sinks are killed between their database commit and Spark's",
    "5. Verdict",
)
PHASES = (
    Phase("1 no faults", 0, 0, Decimal(0), Decimal(0), 0),
    Phase("2 worker killed, exactly-once off", 214, 214, Decimal(0), Decimal(268_113), 83),
    Phase("3 worker killed, exactly-once on", 0, 0, Decimal(0), Decimal(268_113), 83),
    Phase("4 sinks killed after their commit", 0, 604, Decimal(0), Decimal(911_870), 100),
)
PARTITIONS = 4
RIGHT, NAIVE = "balances", "balances-naive"


class MadeUp:
    """A model of the chain that follows a script."""

    def __init__(self, seed: int = 4) -> None:
        self.chance = random.Random(seed)  # noqa: S311
        self.keys = [str(uuid.UUID(int=self.chance.getrandbits(128), version=4)) for _ in range(8)]
        self.source = {key: Total(1_000_000, 1) for key in self.keys}
        self.totals = {name: dict(self.source) for name in (RIGHT, NAIVE)}
        self.rows: list[OutboxRow] = []
        self.ends: dict[str, dict[int, int]] = {
            topic: dict.fromkeys(range(PARTITIONS), 120) for topic in ("ledger.account", "ledger.balance")
        }
        self.fresh: list[Record] = []
        self.duplicates = {RIGHT: 0, NAIVE: 0}
        self.applied = {RIGHT: 960, NAIVE: 960}
        self.batches: list[Batch] = []
        self.transfers = 480
        self.mode = "exactly-once"
        self.down: set[str] = set()

    def transfer(self, at_ms: int) -> None:
        """Two events."""
        self.transfers += 1
        amount = self.chance.randint(1, 5_000)
        for key, change in zip(self.chance.sample(self.keys, 2), (-amount, amount), strict=True):
            self.source[key] = Total(self.source[key].total + change, self.source[key].version + 1)
            self.event("balance.credited" if change > 0 else "balance.debited", 1, key, at_ms, change)

    def event(self, name: str, version: int, key: str, at_ms: int, amount: int | None = None) -> None:
        """An event that every sink applies at once."""
        aggregate, _, type_ = name.partition(".")
        row = OutboxRow(str(uuid.uuid4()), aggregate, type_, version, key, amount, at_ms)
        self.rows = [*self.rows, row][-200:]
        self.relay(row, at_ms + 18)
        if amount is not None:
            for sink in (RIGHT, NAIVE):
                self._add(sink, key, amount, self.source[key].version)

    def relay(self, row: OutboxRow, at_ms: int) -> None:
        """Write its record."""
        topic = f"ledger.{row.aggregate}"
        partition = int(row.key[:8], 16) % PARTITIONS
        self.ends[topic][partition] += 2
        headers = {"id": row.id, "eventType": row.type, "schemaVersion": str(row.schema_version)}
        value = f'{{"account_id": "{row.key}", "amount": {row.amount}}}'
        self.fresh.append(
            Record(topic, partition, self.ends[topic][partition] - 2, row.id, row.key, headers, value, at_ms)
        )

    def stranger(self, at_ms: int) -> None:
        """A record that breaks the contract."""
        self.ends["ledger.balance"][0] += 1
        offset = self.ends["ledger.balance"][0] - 1
        self.fresh.append(Record("ledger.balance", 0, offset, None, HOSTILE, {}, HOSTILE, at_ms))

    def repeat(self, count: int, at_ms: int) -> None:
        """Send the last events again: the right sink skips them, the naive one adds them."""
        for row in [row for row in self.rows if row.amount is not None][-count:]:
            self.relay(row, at_ms)
            self.replay(row)

    def replay(self, row: OutboxRow) -> None:
        """Process an event once more."""
        self.duplicates[RIGHT] += 1
        self._add(NAIVE, row.key, row.amount or 0, self.totals[NAIVE][row.key].version)

    def readings(self, at_ms: int) -> Readings:
        """As a probe would read it."""
        self.batches = [*self.batches, Batch(len(self.batches) + 1, _copy(self.ends), at_ms + 124)]
        records, self.fresh = self.fresh, []
        down = Down("it does not answer")
        sinks = [
            Sink(
                name,
                "dedup" if name == RIGHT else "naive",
                None,
                0,
                self.applied[name],
                self.duplicates[name],
                1 if self.batches[20:] else 0,
                _copy(self.ends),
                dict(self.totals[name]),
                self.batches[-6:],
            )
            for name in (RIGHT, NAIVE)
        ]
        accounts = Sink("turnover", "dedup", "in_euros", 0, 480, 0, 0, _copy(self.ends), None, self.batches[-3:])
        position = 0x1A2B3C0 + 400 * len(self.rows) + self.transfers * 300
        source = Source(
            len(self.keys) + 101, self.transfers, 2 * self.transfers + 117, position, self.rows, self.source
        )
        return Readings(
            at_ms,
            source,
            down if "slot" in self.down else Slot(True, position - 3_000, 3_000 + 997 * (self.transfers % 9)),
            down if "connect" in self.down else Connector("RUNNING", "RUNNING", self.mode, "poll", None),
            down if "topics" in self.down else Topics(_copy(self.ends), records),
            [*sinks, accounts],
            {name: {"state": "running", "failure": None} for name in (RIGHT, NAIVE, "turnover")},
        )

    def _add(self, name: str, key: str, amount: int, version: int) -> None:
        self.applied[name] += 1
        self.totals[name][key] = Total(self.totals[name][key].total + amount, version)


class MadeUpDesk(Desk):
    """Accepts everything, and does nothing."""

    def __init__(self, state: State) -> None:
        self.asked: list[str] = []
        self.is_free = True
        self._state = state

    def act(self, name: str) -> bool:
        self.asked.append(ACTIONS[name].label)
        return self.is_free

    def lesson(self, verb: str) -> bool:
        self.asked.append(verb)
        return True

    def look_up(self, event_id: str) -> dict[str, Any] | None:
        journey = self._state.journeys.get(event_id)
        if journey is None:
            return None
        row = journey.row and {"id": journey.id, "aggregateid": journey.row.key, "type": journey.row.type}
        records = [vars(one) | {"headers": dict(one.headers)} for one in journey.records]
        return {"row": row, "records": records}


def tell(hub: Hub, state: State, model: MadeUp, end_ms: int) -> None:
    """Publish five minutes that end now."""
    faults = {
        150: ("Exactly-once off", "the Connect worker is killed", 26),
        90: ("Exactly-once on", "the worker is killed again", 0),
        45: ("Crash the sinks", "between their commit and Spark's", 60),
    }
    for seconds in range(300, 0, -2):
        at_ms = end_ms - seconds * 1000
        for _ in range(model.chance.choice([0, 1, 1, 2, 3])):
            model.transfer(at_ms)
        if seconds in faults:
            title, what, repeats = faults[seconds]
            state.cause = f"{title}: {what}"
            hub.publish(logs={"marks": [{"at_ms": at_ms, "kind": "fault", "text": state.cause}]})
            model.repeat(repeats, at_ms)
        if seconds == 12:
            model.event("account.opened", 1, model.keys[0], at_ms)
            model.event("account.opened", 2, model.keys[1], at_ms)
            model.stranger(at_ms)
        shown = state.apply(model.readings(at_ms))
        hub.publish(shown.parts, shown.logs, shown.tables)


def lesson(phase: str, step: int, *, paused: bool) -> dict[str, Any]:
    """The lesson at a step."""
    question = QUESTIONS.get(step)
    return {
        "run": 1,
        "steps": list(TITLES),
        "done": step + (phase in ("played", "over")),
        "step": step,
        "phase": phase,
        "paused": paused,
        "failed": None,
        "question": question and {"text": question.text, "options": list(question.options)},
        "answers": {
            str(number): QUESTIONS[number].explain(PHASES[: min(number, 4)])
            for number in QUESTIONS
            if number < step or (number == step and phase in ("played", "over"))
        },
        "phases": [{name: str(value) for name, value in vars(one).items()} for one in PHASES[: max(0, step)]],
    }


class Stage:
    """The page on a made-up chain, served on a port."""

    def __init__(self, port: int = 0, token: str | None = None) -> None:
        self.hub, self.state, self.model = Hub(LOGS, TABLES), State(), MadeUp()
        self.desk = MadeUpDesk(self.state)
        tell(self.hub, self.state, self.model, now_ms())
        actions = [
            {"name": name, "label": one.label, "hint": one.hint, "group": one.group, "lacks": None}
            for name, one in ACTIONS.items()
        ]
        self.hub.publish({"stage": {"busy": None, "actions": actions}}, {"lines": LINES, "said": said(self.state)})
        self.hub.publish({"lesson": lesson("asking", 4, paused=True)})
        self._token = token or secrets.token_urlsafe()
        self._server = Server("127.0.0.1", port)
        self._server.start(create_app(self.hub, self.desk, Guard(self._token)))

    @property
    def url(self) -> str:
        """The address with the token."""
        return f"http://127.0.0.1:{self._server.port}/#token={self._token}"

    def advance(self) -> None:
        """A transfer, and a reading."""
        at_ms = now_ms()
        self.model.transfer(at_ms)
        self.read(at_ms)

    def read(self, at_ms: int | None = None) -> None:
        """A reading."""
        shown = self.state.apply(self.model.readings(at_ms or now_ms()))
        self.hub.publish(shown.parts, shown.logs, shown.tables)

    def restarted(self) -> Stage:
        """Stop the server, and start another on its port, which takes the same token."""
        self.close()
        return Stage(self._server.port, self._token)

    def close(self) -> None:
        """Stop the server."""
        self.hub.close()
        self._server.stop()


LINES = [
    {"kind": "title", "text": TITLES[2]},
    {"kind": "progress", "text": "connect: switching exactly-once off"},
    {"kind": "expect", "text": "the effective mode, as reported by Connect", "found": "at-least-once", "held": True},
    {"kind": "expect", "text": "nothing is lost", "found": "3187 in the outbox, 0 lost", "held": True},
]


def said(state: State) -> list[dict[str, Any]]:
    """The page's messages about the last fault."""
    drift = format(state.summary[NAIVE]["drift"], ",")
    label = ACTIONS["crash-sinks"].label
    done = (
        "The sinks were killed after their database had committed and before Spark noted it: batch 131 of balances."
        " Spark repeated the batch. A sink that remembers event ids skips it; one that does not counts it twice."
    )
    settled = (
        "Nothing is in flight any more, 21.4 s after it began: balances agrees with the ledger; balances-naive is off"
        f" by {drift}."
    )
    at_ms = now_ms()
    return [
        {"at_ms": at_ms - 9_000, "kind": "done", "label": label, "text": done},
        {"at_ms": at_ms, "kind": "settled", "label": label, "text": settled},
    ]


def main() -> None:
    """Serve it until Ctrl-C. The address is printed."""
    stage = Stage(int(sys.argv[1]) if sys.argv[1:] else 8090)
    print(stage.url, flush=True)  # noqa: T201
    while not threading.Event().wait(0.5):
        if sys.argv[2:]:
            stage.advance()


def _copy(ends: dict[str, dict[int, int]]) -> dict[str, dict[int, int]]:
    return {topic: dict(of) for topic, of in ends.items()}


if __name__ == "__main__":
    main()
