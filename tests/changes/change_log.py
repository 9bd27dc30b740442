"""Changes of accounts as the sink `changes` stages them, and a ledger that makes them up as a log has them."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, load
from outbox.relay import connectors
from outbox.sink import records, strategy
from outbox.sink.batch import Batch, DeadRecord
from outbox.sink.postgres.target import PostgresTarget
from outbox.sink.postgres.writer import PostgresWriter
from outbox.sink.spec import SinkJob, SinkSpec
from outbox.sink.strategy import Strategy

from sinks.changes.records import CHANGE, ChangeDecoder
from tests.support.made_events import nth_key
from tests.support.paths import ROOT
from tests.support.sink_driver import projections_in

FOLDER = ROOT / "sinks" / "changes"
STRATEGY = strategy.find(FOLDER / "strategies" / "changes.sql")
PROJECTIONS = FOLDER / "projections"
PROJECTION = PROJECTIONS / "balances.sql"
DECODER = ChangeDecoder()
TOPIC = connectors.load(load(environment=False), "changes").topic
TOPIC_ID = "topic-1"
STEP = 8  # records of the log begin at multiples of it


@dataclass(frozen=True)
class Change:
    """A change of a row; of a deletion the state is not told."""

    account_id: str
    op: str
    lsn: int
    balance_minor: int | None = None
    version: int | None = None
    currency: str | None = "EUR"
    table_name: str = "accounts"

    @property
    def event_id(self) -> str:
        """The id that the sink gives it."""
        text = f"{self.table_name}|{self.account_id}|{self.lsn}|{self.op}|"
        return str(uuid.UUID(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()))

    def record(self, **changes: Any) -> tuple[bytes, bytes]:
        """Key and value as Debezium writes them; of a deletion it makes up what the log does not have.

        ``changes`` are columns of the row to be other than they should be.
        """
        row: dict[str, Any] = {
            "id": self.account_id,
            "kind": "user",
            "currency": self.currency,
            "created_at": "2026-11-21T05:00:00Z",
        }
        row |= {"label": "rent", "status": "open", "account_version": 1}
        state = {**row, "balance_minor": self.balance_minor, "version": self.version, **changes}
        made_up = {"id": self.account_id, "kind": "", "currency": "", "balance_minor": 0, "version": 0}
        envelope = {
            "before": made_up if self.op == "d" else None,
            "after": None if self.op == "d" else state,
            "source": {"schema": "public", "table": self.table_name, "lsn": self.lsn, "snapshot": "false"},
            "op": self.op,
            "ts_ms": 1_795_273_008_225,
        }
        return json.dumps({"id": self.account_id}).encode(), json.dumps(envelope).encode()


class Ledger:
    """A table of accounts and its log. Amounts are such that no two mistakes cancel.

    ``first`` is the number of its first account: two ledgers share none.
    """

    def __init__(self, first: int = 0) -> None:
        self.log: list[Change] = []
        self._next_account = first
        self._lsn = 1000 + (first << 8)
        self._amount = 1
        self.rows: dict[str, tuple[int, int]] = {}  # balance and version

    def open(self) -> str:
        """Insert an account."""
        self._next_account += 1
        made = nth_key(self._next_account)
        self._set(made, "c", 0, 0)
        return made

    def transfer(self, to: str) -> None:
        """Change a balance."""
        self.log.append(self._transfer(to))

    def rename(self, old: str, new: str | None = None) -> str:
        """Change a primary key, which is a deletion and an insert at one LSN."""
        if new is None:
            self._next_account += 1
            new = nth_key(self._next_account)
        balance, version = self.rows.pop(old)
        self.log.append(Change(old, "d", self._lsn, currency=None))
        # The projection's limit: a key that another row takes over must go on above its last version.
        before = max((change.version or 0 for change in self.log if change.account_id == new), default=0)
        self._set(new, "c", balance, max(version, before) + 1)
        return new

    def snapshot(self, meanwhile: str | None = None) -> None:
        """Send every row again, with the LSN at which the next change will begin.

        ``meanwhile`` is an account that an open transaction has changed: below that LSN, and not yet to be seen.
        """
        lsn, before = self._lsn, dict(self.rows)
        late = None if meanwhile is None else self._transfer(meanwhile)
        if late is not None:
            lsn = self._lsn
        self.log += [Change(key, "r", lsn, balance, version) for key, (balance, version) in before.items()]
        self.log += [] if late is None else [late]

    def balances(self, until: int | None = None) -> Mapping[str, int]:
        """What the log comes to; an account that is gone has nothing."""
        return {change.account_id: change.balance_minor or 0 for change in self.log[:until]}

    def _transfer(self, to: str) -> Change:
        balance, version = self.rows[to]
        self._amount *= 5
        return self._take(to, "u", balance + self._amount, version + 1)

    def _set(self, key: str, op: str, balance: int, version: int) -> None:
        self.log.append(self._take(key, op, balance, version))

    def _take(self, key: str, op: str, balance: int, version: int) -> Change:
        self.rows[key] = (balance, version)
        taken = Change(key, op, self._lsn, balance, version)
        self._lsn += STEP
        return taken


def under_another_lsn(change: Change, lsn: int) -> Change:
    """A state that is told once more, as by a snapshot."""
    return replace(change, op="r", lsn=lsn)


def decoded(change: Change) -> records.DecodedEvent:
    """The change as the decoder returns it."""
    row = asdict(change)
    return records.DecodedEvent(change.event_id, tuple(row[column.name] for column in DECODER.types[CHANGE]), CHANGE)


def batch(changes: Sequence[Change], start: int = 0, dead: Sequence[DeadRecord] = ()) -> Batch:
    """A batch of one partition."""
    end = start + len(changes) + len(dead)
    places = [(0, start + place) for place in range(len(changes))]
    rows = {CHANGE: DECODER.rows(CHANGE, [decoded(change) for change in changes], places)}
    return Batch(TOPIC, TOPIC_ID, {0: start}, {0: end}, rows, dead)


@contextmanager
def open_sink(settings: Settings, one: Strategy = STRATEGY, projection: str | None = None) -> Iterator[PostgresWriter]:
    """The sink, with the fence, until the end of the block; ``projection`` is SQL in place of its own."""
    folder = PROJECTIONS if projection is None else projections_in(settings.home, projection)
    job = SinkJob(
        name=one.name,
        decoders={TOPIC: DECODER},
        strategy=FOLDER / "strategies" / "changes.sql",
        projections=folder,
        target=PostgresTarget(),
        carries="states",
    )
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        yield PostgresWriter(connection, SinkSpec(one.name, job, one, job.decoders))


UPDATED = Change(nth_key(7), "u", 4096, balance_minor=-(2**63), version=2**63 - 1)
DELETED = Change(nth_key(7), "d", 4104, currency=None)


def _with(change: Change, old: str, new: str, key: bytes | None = None) -> tuple[bytes, bytes]:
    """Its record, one thing in the value's text replaced, or another key."""
    own_key, value = change.record()
    assert old.encode() in value
    return own_key if key is None else key, value.replace(old.encode(), new.encode())


# Records by what is the matter, and the fault that is found; None if nothing is.
CASES: dict[str, tuple[tuple[bytes | None, bytes | None], str | None]] = {
    "an update": (UPDATED.record(), None),
    "a deletion": (DELETED.record(), None),
    "a row of a snapshot": (replace(UPDATED, op="r").record(), None),
    "a new row": (replace(UPDATED, op="c", version=0).record(), None),
    "a column that came later": (UPDATED.record(nickname="é"), None),
    "a tombstone": ((UPDATED.record()[0], None), "no value"),
    "no JSON": ((UPDATED.record()[0], b"{"), "not JSON"),
    "something behind it": (_with(UPDATED, '"ts_ms": 1795273008225}', '"ts_ms": 1} {}'), "not JSON"),
    "no text": ((UPDATED.record()[0], b"\xff"), "not UTF-8"),
    "no object": ((UPDATED.record()[0], b"[]"), "schema violation"),
    "no op": (_with(UPDATED, '"op"', '"o"'), "schema violation"),
    "another op": (replace(UPDATED, op="t").record(), "schema violation"),
    "another table": (replace(UPDATED, table_name="transfers").record(), "schema violation"),
    "no lsn": (_with(UPDATED, '"lsn"', '"l"'), "schema violation"),
    "an lsn as text": (_with(UPDATED, "4096", '"4096"'), "schema violation"),
    "a negative lsn": (replace(UPDATED, lsn=-1).record(), "schema violation"),
    "an lsn beyond 64 bits": (replace(UPDATED, lsn=2**63).record(), "schema violation"),
    "no row": (_with(UPDATED, '"after"', '"later"'), "schema violation"),
    "no version": (_with(UPDATED, '"version"', '"v"'), "schema violation"),
    "a version that is null": (UPDATED.record(version=None), "schema violation"),
    "a negative version": (UPDATED.record(version=-1), "schema violation"),
    "a version as text": (UPDATED.record(version="1"), "schema violation"),
    "a balance beyond 64 bits": (UPDATED.record(balance_minor=2**63), "schema violation"),
    "a balance with a fraction": (UPDATED.record(balance_minor=0.5), "schema violation"),
    "no currency": (UPDATED.record(currency=None), "schema violation"),
    "a currency as a number": (UPDATED.record(currency=123), "schema violation"),
    "a currency and a line end": (UPDATED.record(currency="EUR\n"), "schema violation"),
    "an id that is none": (UPDATED.record(id="7"), "schema violation"),
    "a deletion of nothing": (_with(DELETED, '"before"', '"b"'), "schema violation"),
    "another key": (_with(UPDATED, '"op"', '"op"', Change(nth_key(8), "u", 1).record()[0]), "key mismatch"),
    "a key that is no JSON": ((nth_key(7).encode(), UPDATED.record()[1]), "key mismatch"),
    "a key and more": ((UPDATED.record()[0] + b"{}", UPDATED.record()[1]), "key mismatch"),
    "no key": ((None, UPDATED.record()[1]), "key mismatch"),
}
