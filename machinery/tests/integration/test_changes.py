"""The strategy `changes`: rows of a log, however they are delivered; and what each part of it is for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from random import Random

import hypothesis
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from psycopg2 import extensions

from outbox.audit import declared, sinks, source
from outbox.audit.comparison import compare_states
from outbox.audit.report import SinkReport
from outbox.audit.store import Store
from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.events.schema import Rejection
from outbox.relay import slot
from outbox.relay.connectors import load
from outbox.sink import discovery
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.decoding.records import DeadRecord, Record
from outbox.sink.repair import replay
from outbox.sink.repair.replay import Chosen, Replayed, Selection
from outbox.sink.writer import Counts
from outbox_lab.testing.helpers import query
from tests.change_log import (
    NAME,
    PROJECTION,
    SPEC,
    TOPIC,
    TOPIC_ID,
    Change,
    Items,
    batch,
    open_sink,
    under_another_lsn,
)
from tests.support.made_events import NOW_MS, nth_key
from tests.support.sink_driver import Database

GUARD = "\n WHERE excluded.version > stored.version"


@pytest.fixture
def database(databases: Settings) -> Database:
    return Database(databases, NAME)


# However they are delivered ---------------------------------------------------------------------------------------

ACTS = ("move", "move", "move", "add", "rename", "rename back", "snapshot", "snapshot in between")
acts = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 99)), max_size=24)


def act(items: Items, name: str, number: int, renamed: list[str]) -> None:
    """Let something happen to a table, to one of its items if there are any."""
    chosen = [*items.rows][number % len(items.rows)] if items.rows else ""
    gone = [key for key in renamed if key not in items.rows]
    match name:
        case "snapshot":
            items.snapshot()
        case _ if name == "add" or not chosen:
            items.add()
        case "move":
            items.move(chosen)
        case "rename":
            renamed.append(chosen)
            items.rename(chosen)
        case "rename back":
            renamed.append(chosen)
            items.rename(chosen, gone[number % len(gone)] if gone else None)
        case "snapshot in between":
            items.snapshot(meanwhile=chosen)


class Delivery:
    """Puts a log onto a topic, never a key's changes in another order, and lets a sink read it.

    What may come beside: changes sent again in their order (under their LSN, at other offsets), twice in one batch,
    other keys first; older states under another LSN, at any place; and the same offsets read again.
    """

    def __init__(self, sink: PostgresWriter, items: Items, random: Random) -> None:
        self._sink = sink
        self._log = items.log
        self._random = random
        self._position = sink.positions(TOPIC, TOPIC_ID).get(0, 0)
        self.sent = 0

    def next(self, count: int, back: int, twice: int, late: int, again: bool) -> None:
        """Deliver the next changes of the log with so many of each of these."""
        old, new = self._log[max(0, self.sent - back) : self.sent], self._log[self.sent : self.sent + count]
        changes = self._shuffled([*old, *new, *new[-twice:]] if twice else [*old, *new])
        known = [change for change in self._log[: self.sent] if change.op != "d"]
        for state in self._random.choices(known, k=late) if known else []:
            changes.insert(
                self._random.randint(0, len(changes)), under_another_lsn(state, self._random.getrandbits(40))
            )
        self._sink.apply(batch(changes, self._position))
        if again:
            self._sink.apply(batch(changes, self._position))
        self._position += len(changes)
        self.sent += len(new)

    def _shuffled(self, changes: Sequence[Change]) -> list[Change]:
        of_key = defaultdict(list)
        for change in changes:
            of_key[change.item_id].append(change)
        keys = [change.item_id for change in changes]
        self._random.shuffle(keys)
        return [of_key[key].pop(0) for key in keys]


class Run:
    """One sink, for one example after the other; each has items of its own."""

    def __init__(self, sink: PostgresWriter, database: Database) -> None:
        self.sink = sink
        self.database = database
        self.examples = 0


@pytest.fixture
def run(databases: Settings, database: Database) -> Iterator[Run]:
    with open_sink(databases) as sink:
        yield Run(sink, database)


@hypothesis.settings(
    max_examples=80, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    acts,
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=6
    ),
    st.integers(0, 2**32),
)
@example([("add", 0), ("rename", 0), ("rename back", 0), ("move", 0)], [(6, 0, 0, 0, False), (0, 6, 0, 0, False)], 0)
def test_the_totals_are_those_of_the_log_however_it_is_delivered(
    run: Run, history: list[tuple[str, int]], batches: list[tuple[int, int, int, int, bool]], seed: int
) -> None:
    run.examples += 1
    items, renamed = Items(run.examples << 8), list[str]()
    for name, number in history:
        act(items, name, number, renamed)
    delivery = Delivery(run.sink, items, Random(seed))  # noqa: S311
    for each in [*batches, (len(items.log), 3, 1, 3, True)]:
        delivery.next(*each)
        ours, found = items.totals(delivery.sent), run.database.totals()
        assert {key: found.get(key) for key in ours} == ours


# What each part is for --------------------------------------------------------------------------------------------


def totals_after(settings: Settings, name: str, batches: Sequence[Sequence[Change]], **parts: str) -> dict[str, int]:
    """The totals of a sink of another name, with other SQL if given, after these batches."""
    one = replace(SPEC.strategy, name=name, select=parts.get("sql", SPEC.strategy.select))
    with open_sink(settings, one, parts.get("projection")) as sink:
        start = 0
        for changes in batches:
            sink.apply(batch(changes, start))
            start += len(changes)
    return Database(settings, name).totals()


def test_without_the_guard_on_versions_a_late_older_state_wins(databases: Settings) -> None:
    items = Items()
    one = items.add()
    items.move(one)
    items.move(one)
    batches = [items.log, [under_another_lsn(items.log[1], 5)]]
    unguarded = PROJECTION.read_text().replace(GUARD, "")
    assert unguarded != PROJECTION.read_text()
    assert totals_after(databases, "guarded", batches) == items.totals()
    assert totals_after(databases, "unguarded", batches, projection=unguarded) == {one: 5}


def keyed_without(part: str) -> str:
    """The strategy, had its key not this part."""
    key = {"pk": "item_id::text", "lsn": "lsn", "op": "op"} | {part: "0" if part == "lsn" else "''"}
    return f"""
        WITH came AS (SELECT *, {key["pk"]} AS k_pk, {key["lsn"]}::bigint AS k_lsn, {key["op"]} AS k_op
                        FROM outbox_batch),
             unseen AS (
            INSERT INTO processed_changes (sink, table_name, pk, lsn, op)
            SELECT DISTINCT %(sink)s, table_name, k_pk, k_lsn, k_op FROM came
            ON CONFLICT DO NOTHING RETURNING pk, lsn, op
        )
        INSERT INTO new_events
        SELECT DISTINCT ON (k_pk, k_lsn, k_op)
               event_id, partition, "offset", table_name, item_id, came.op, came.lsn, unit, stock,
               version
          FROM came JOIN unseen ON (k_pk, k_lsn, k_op) = (unseen.pk, unseen.lsn, unseen.op)
         ORDER BY k_pk, k_lsn, k_op, "offset"
    """


@pytest.mark.parametrize("left_out", ["pk", "lsn", "op", "nothing"])
def test_a_key_without_one_of_its_parts_takes_changes_for_duplicates(databases: Settings, left_out: str) -> None:
    items = Items()
    first, second, third = items.add(), items.add(), items.add()
    before = len(items.log)
    items.snapshot()
    items.move(first)  # begins where the snapshot was taken
    items.move(second)
    items.move(second)
    batches = [[change] for change in items.log[before:]]
    found = totals_after(databases, left_out, batches, sql=keyed_without(left_out))
    wrong = [key for key, total in items.totals().items() if found.get(key) != total]
    assert wrong == {"pk": [third], "lsn": [second], "op": [first], "nothing": []}[left_out]


def test_a_change_at_a_position_of_another_log_is_applied_once_the_memory_is_deleted(
    databases: Settings, database: Database
) -> None:
    """As after a restore of a dump: the log begins anew, and may have a change where the old one had another."""
    items = Items()
    one = items.add()
    items.move(one)
    newer = replace(items.log[-1], stock=99, version=9)
    with open_sink(databases) as sink:
        sink.apply(batch(items.log))
        sink.apply(batch([newer], 2))
        assert database.totals() == items.totals(), "it was skipped as known"
        query(databases, f"DELETE FROM processed_changes WHERE sink = '{NAME}'", SinkRole.OWNER)
        sink.apply(batch([newer, *items.log], 3))  # older states that are read again change nothing
        assert database.totals() == {one: 99}


# As an engine's sink ----------------------------------------------------------------------------------------------


def letter(change: Change, **changes: object) -> DeadRecord:
    key, value = change.record(**changes)
    return DeadRecord(0, 7, Record(key, [], value, NOW_MS), change.event_id, Rejection("schema violation", ""))


def open_letters(connection: extensions.connection) -> list[Chosen]:
    return Selection(sink=NAME).choose(connection)


def replayed(settings: Settings) -> dict[str, Replayed]:
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        chosen = open_letters(connection)
        return replay.replay(connection, discovery.sinks(settings), chosen, applier_of=PostgresApplier)


def test_a_dead_letter_is_replayed_and_does_not_undo_what_came_since(databases: Settings, database: Database) -> None:
    items = Items()
    one, two = items.add(), items.add()
    items.move(one)
    items.move(one)
    items.move(two)
    first, second, old, new, last = items.log
    with open_sink(databases) as sink:
        assert sink.apply(batch([first, second, new], dead=[letter(old), letter(last)])) == Counts(
            rows=3, applied=3, dead=2
        )
    assert replayed(databases) == {NAME: Replayed(applied=2)}
    assert database.totals() == items.totals()
    assert database.query("SELECT DISTINCT status FROM dead_letters") == [("replayed",)]
    with open_sink(databases) as sink:
        assert sink.apply(batch([old, last], start=5)).applied == 0, "sent again"


def checked(settings: Settings) -> SinkReport:
    """The sink against the source."""
    known = declared.load(settings)
    with closing(Store()) as store:
        [state] = sinks.read(settings, known, store).states
        with source.read(settings, known, store):
            return compare_states(known, state, store)


def test_check_tells_a_state_that_is_behind_from_a_wrong_one(databases: Settings) -> None:
    query(
        databases,
        "INSERT INTO items (id, unit, stock, version) VALUES"
        " ('00000000-0000-0000-0000-000000000001', 'KGM', 30, 3),"
        " ('00000000-0000-0000-0000-000000000002', 'KGM', 0, 0)",
    )
    one, two, gone = nth_key(1), nth_key(2), nth_key(3)
    with open_sink(databases) as sink:
        sink.begin_at({TOPIC: {0: 0}}, {TOPIC: TOPIC_ID})
        assert (checked(databases).in_flight, checked(databases).drift) == (4 + 1, {}), "nothing has come yet"
        sink.apply(batch([Change(one, "r", 8, 10, 1), Change(gone, "r", 8, 7, 1), Change(gone, "d", 16, unit=None)]))
        assert (checked(databases).in_flight, checked(databases).drift) == (2 + 1, {})
        sink.apply(batch([Change(one, "u", 24, 30, 3), Change(two, "r", 8, 0, 0)], start=3))
        assert (checked(databases).in_flight, checked(databases).drift) == (0, {})
        query(databases, "UPDATE items SET stock = 28 WHERE version = 3")
        assert checked(databases).drift == {one: 2}, "of one version there is one state"
        sink.apply(batch([Change(gone, "c", 32, 9, 2)], start=5))
        assert checked(databases).drift == {one: 2, gone: 9}, "the source has no such item"
        sink.apply(batch([], start=6, dead=[letter(Change(two, "u", 40, 1, 1))]))
        assert checked(databases).parked == 1


# The publication and the grant, on demand -------------------------------------------------------------------------


def may_read(settings: Settings) -> bool:
    ((granted,),) = query(
        settings, f"SELECT has_table_privilege('{settings.role_name(SourceRole.CDC)}', 'items', 'SELECT')"
    )
    return bool(granted)


def test_what_capturing_needs_is_made_on_demand_and_taken_back(databases: Settings) -> None:
    settings = databases.replace(connector=f"outbox_{databases.source_db_url.name}")
    changes, other = load(settings, NAME), load(databases, NAME)
    assert not may_read(databases)
    with pytest.raises(Failure, match=r"publication .* does not exist — `outbox connect remove changes"):
        slot.require_whole_table(settings, changes)
    slot.publish(settings, changes)
    slot.publish(settings, changes)
    slot.require_whole_table(settings, changes)
    slot.publish(settings, other)
    assert may_read(databases)
    slot.unpublish(settings, changes)
    assert may_read(databases), "the other one reads it yet"
    slot.unpublish(settings, other)
    slot.unpublish(settings, other)
    assert not may_read(databases)
    assert query(databases, "SELECT pubname FROM pg_publication") == [("outbox",)]


@pytest.mark.parametrize("let", ["insert, update", "insert, delete", "update, delete"])
def test_a_publication_that_does_not_let_every_change_pass_is_refused(databases: Settings, let: str) -> None:
    changes = load(databases, NAME)
    query(databases, f"CREATE PUBLICATION {changes.publication} FOR TABLE items WITH (publish = '{let}')")
    slot.publish(databases, changes)
    with pytest.raises(Failure, match="does not publish"):
        slot.require_whole_table(databases, changes)


def test_without_the_table_there_is_nothing_to_capture(databases: Settings) -> None:
    query(databases, "DROP VIEW source_totals; DROP TABLE items", SourceRole.OWNER)
    with pytest.raises(Failure, match=r"refuses the capture of public.items"):
        slot.publish(databases, load(databases, NAME))
