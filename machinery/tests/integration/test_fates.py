"""What becomes of each event, whatever is done to it: sent, spoilt, refused, replayed, discarded, sent again.

A model says it event by event. It knows the letters and what a strategy promises, and nothing of SQL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from psycopg2 import extensions

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink.batch import Rows
from outbox.sink.postgres.applier import PostgresApplier
from outbox.sink.repair import replay
from outbox.sink.repair.selection import Chosen, Selection
from tests.support.deliveries import POOL, checked
from tests.support.made_events import PROJECTIONS, STRATEGIES, TOPIC, Event, batch, nth_key, rows
from tests.support.record_corpus import unread
from tests.support.sink_driver import Database, sink_on, spec_with

EVENTS = POOL[:8]  # of four keys, two each
NEVER = "2"  # the schema version of a record that no replay makes valid

# The events that the projection refuses now, and a projection that keeps what the project's own does.
TABLE = "CREATE TABLE unwelcome (event_id uuid); GRANT SELECT, INSERT, DELETE ON unwelcome TO {writer};"
REFUSE = """
INSERT INTO rejections
SELECT event_id, 'unwelcome', 'as yet' FROM new_events WHERE event_id IN (SELECT event_id FROM unwelcome);
"""


@dataclass(frozen=True)
class Send:
    """Deliver a batch: events by their numbers, the spoilt ones as invalid records, ``back`` offsets before the end."""

    numbers: Sequence[int]
    spoilt: Collection[int] = ()
    back: int = 0


@dataclass(frozen=True)
class Refuse:
    """From now on the projection refuses exactly these."""

    numbers: Collection[int]


@dataclass(frozen=True)
class Replay:
    """Replay the open letters of these."""

    numbers: Collection[int]


@dataclass(frozen=True)
class Discard:
    """Discard the open letters of these."""

    numbers: Collection[int]


@dataclass(frozen=True)
class Restart:
    """Stop the sink and start it again."""


Act = Send | Refuse | Replay | Discard | Restart
number = st.integers(0, len(EVENTS) - 1)
some = st.lists(number, max_size=4)
acts = st.lists(
    st.one_of(
        st.builds(Send, st.lists(number, min_size=1, max_size=6), st.frozensets(number, max_size=2), st.integers(0, 4)),
        st.builds(Refuse, st.frozensets(number, max_size=3)),
        st.builds(Replay, st.frozensets(number, max_size=8)),
        st.builds(Discard, st.frozensets(number, max_size=2)),
        st.just(Restart()),
    ),
    max_size=12,
)


@dataclass
class Letter:
    """A dead letter: of an invalid record, or of an event that was refused."""

    is_event: bool
    status: str = "open"
    place: int | None = None  # the offset of an invalid record


@dataclass
class Model:
    """What a sink with one strategy knows and holds."""

    strategy: str
    refused: frozenset[int] = frozenset()
    applied: list[int] = field(default_factory=list)
    letters: dict[int, Letter] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)  # events that a strategy knows by their ids
    position: int = 0

    def send(self, start: int, spoilt: Sequence[tuple[int, int]], valid: Sequence[tuple[int, int]]) -> None:
        """A batch from an offset on: events with their offsets."""
        for one, offset in spoilt:
            self.letters.setdefault(one, Letter(is_event=False, place=offset))
        resolved = {one for one, letter in self.letters.items() if letter.status != "open" or letter.is_event}
        rows_left = [(one, offset) for one, offset in valid if one not in resolved]
        highest = {EVENTS[one].key: self.highest(EVENTS[one].key) for one, _ in rows_left}
        new = [one for one, offset in rows_left if self.is_new(one, offset, highest)]
        if self.strategy == "offsets":  # it knows the place of a record that was invalid, and has not applied its event
            new += [one for one, offset in rows_left if one not in new and self.is_open_at(one, offset)]
        self.conclude({one for one, _ in rows_left}, new)
        self.position = max(self.position, start + len(spoilt) + len(valid))

    def replay(self, numbers: Collection[int], valid_now: Collection[int]) -> None:
        """A replay of letters; of the invalid records these are valid now."""
        chosen = [one for one in sorted(self.letters) if one in numbers and self.letters[one].status == "open"]
        batch_of = [one for one in chosen if self.letters[one].is_event or one in valid_now]
        highest = {EVENTS[one].key: self.highest(EVENTS[one].key) for one in batch_of}
        known = [one for one in batch_of if not self.is_new(one, self.letters[one].place, highest)]
        admitted = [one for one in batch_of if self.letters[one].is_event or self.strategy == "offsets"]
        self.conclude(set(batch_of), [one for one in batch_of if one in admitted or one not in known])

    def is_new(self, one: int, offset: int | None, highest: Mapping[str, int]) -> bool:
        """Whether the strategy takes it as new. ``offset`` is the place of its record. It is None for the dead letter
        of a refused event, because the strategy has seen that place already.
        """
        match self.strategy:
            case "naive":
                return True
            case "upsert":
                return EVENTS[one].version > highest[EVENTS[one].key] and self._first(one)
            case "offsets":
                return offset is None or offset >= self.position
            case _:
                return self._first(one)

    def is_open_at(self, one: int, offset: int) -> bool:
        """Whether an invalid record at this offset is the open letter of the event."""
        return one in self.letters and self.letters[one].status == "open" and self.letters[one].place == offset

    def _first(self, one: int) -> bool:
        is_first = one not in self.seen
        self.seen.add(one)
        return is_first

    def conclude(self, batch_of: Collection[int], new: Sequence[int]) -> None:
        """Refuse what is refused now, apply the rest, close letters."""
        for one in new:
            if one in self.refused:
                self.letters.setdefault(one, Letter(is_event=True)).is_event = True
            else:
                self.applied.append(one)
        for one in batch_of:
            if one in self.letters and self.letters[one].status == "open" and not (one in new and one in self.refused):
                self.letters[one].status = "replayed"
        if self.strategy == "upsert":
            self.seen.clear()

    def highest(self, key: str) -> int:
        """The highest version of a key that was applied."""
        return max((EVENTS[one].version for one in self.applied if EVENTS[one].key == key), default=0)

    def totals(self) -> dict[str, int]:
        """The total of each key."""
        found: dict[str, int] = {}
        for one in self.applied:
            event = EVENTS[one]
            found[event.key] = found.get(event.key, 0) + event.quantity
            if self.strategy == "upsert":
                found[event.key] = max(
                    (EVENTS[other] for other in self.applied if EVENTS[other].key == event.key),
                    key=lambda other: other.version,
                ).total_after
        return found


class Fates:
    """A sink, and what an operator does to it, one example after the other."""

    def __init__(self, settings: Settings, name: str, folder: Path) -> None:
        self.settings, self.name = settings, name
        self.spec = spec_with(STRATEGIES[name], folder)
        self.generation = 0
        self._connection: extensions.connection | None = None
        self.restart()

    def restart(self) -> None:
        """Start the sink, again if it runs."""
        self.close()
        self._connection = connect(self.settings, SinkRole.WRITER)
        self.sink = sink_on(self._connection, self.spec.strategy, self.spec.job.projections)

    def close(self) -> None:
        """Stop the sink."""
        if self._connection is not None:
            self._connection.close()

    def ours(self, event: Event) -> Event:
        """The event with an id and a key that no other example has."""
        shift = self.generation << 8
        event_id = event.event_id[:24] + f"{int(event.event_id[24:], 16) ^ shift:012x}"
        return replace(event, event_id=event_id, key=nth_key(int(event.key[-4:], 16) + shift))

    def run(self, model: Model, things: Sequence[Act]) -> None:
        """Do each of these to the sink and to its model, and compare after each."""
        self.generation += 1
        first = self.sink.positions(TOPIC, "topic-1").get(0, 0)
        never: set[int] = set()  # invalid records that stay invalid
        for act in things:
            match act:
                case Send():
                    self._send(model, act, first, never)
                case Refuse(numbers):
                    model.refused = frozenset(numbers)
                    self._refuse(numbers)
                case Replay(numbers):
                    model.replay(numbers, [one for one in range(len(EVENTS)) if one not in never])
                    self.repair(numbers, self._replay)
                case Discard(numbers):
                    for one in numbers:
                        if one in model.letters and model.letters[one].status == "open":
                            model.letters[one].status = "discarded"
                    self.repair(numbers, partial(replay.discard, because="a test"))
                case Restart():
                    self.restart()
            assert self.fates() == self.expected(model), act

    def _send(self, model: Model, act: Send, first: int, never: set[int]) -> None:
        start = max(0, model.position - act.back)
        places = list(enumerate(act.numbers, start))
        spoilt = [(one, offset) for offset, one in places if one in act.spoilt]
        valid = [(one, offset) for offset, one in places if one not in act.spoilt]
        for one, _ in spoilt:
            if one not in model.letters and one % 2:
                never.add(one)
        dead = [
            unread(self.ours(EVENTS[one]), first + offset, version=NEVER if one in never else "1")
            for one, offset in spoilt
        ]
        whole = batch([], first + start, first + start + len(places), dead=dead)
        self.sink.apply(replace(whole, rows=self._rows([(one, first + offset) for one, offset in valid])))
        model.send(start, spoilt, valid)

    def _rows(self, valid: Sequence[tuple[int, int]]) -> Rows:
        """The rows of events by their numbers, each with its offset."""
        events = [self.ours(EVENTS[one]) for one, _ in valid]
        offsets: dict[str, list[int]] = {}
        for event, (_, offset) in zip(events, valid, strict=True):
            offsets.setdefault(event.name, []).append(offset)
        return {
            name: table.set_column(table.schema.get_field_index("offset"), "offset", [offsets[name]])
            for name, table in rows(events).items()
        }

    def _refuse(self, numbers: Collection[int]) -> None:
        with closing(connect(self.settings, SinkRole.WRITER)) as changing, changing, changing.cursor() as cursor:
            cursor.execute("DELETE FROM unwelcome")
            for one in numbers:
                cursor.execute("INSERT INTO unwelcome VALUES (%s)", (self.ours(EVENTS[one]).event_id,))

    def _replay(self, connection: extensions.connection, chosen: Sequence[Chosen]) -> None:
        replay.replay(connection, {self.name: self.spec}, chosen, applier_of=PostgresApplier)

    def repair(self, numbers: Collection[int], do: Callable[..., object]) -> None:
        """Choose letters and do something about them, as the command does."""
        identities = [self.ours(EVENTS[one]).event_id for one in numbers]
        if not identities:
            return
        with closing(connect(self.settings, SinkRole.WRITER)) as connection:
            with connection, connection.cursor() as cursor:
                chosen = Selection(sink=self.name, identities=identities).choose(cursor)
            do(connection, chosen)

    def fates(self) -> tuple[dict[str, int], dict[str, tuple[str, bool]]]:
        """This example's totals, and its letters: status, and whether it holds an event."""
        mine = {self.ours(event).key for event in EVENTS}
        ids = [self.ours(event).event_id for event in EVENTS]
        database = Database(self.settings, self.name)
        letters = database.query(
            "SELECT identity, status, event IS NOT NULL FROM dead_letters WHERE sink = %s AND identity = ANY(%s)",
            self.name,
            ids,
        )
        return (
            {key: total for key, total in database.totals().items() if key in mine},
            {str(identity): (str(status), bool(is_event)) for identity, status, is_event in letters},
        )

    def expected(self, model: Model) -> tuple[dict[str, int], dict[str, tuple[str, bool]]]:
        """The same by the model."""
        keys = {event.key: self.ours(event).key for event in EVENTS}
        return (
            {keys[key]: total for key, total in model.totals().items()},
            {
                self.ours(EVENTS[one]).event_id: (letter.status, letter.is_event)
                for one, letter in model.letters.items()
            },
        )


@pytest.fixture(params=STRATEGIES)
def fates(databases: Settings, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fates]:
    with closing(connect(databases, SinkRole.OWNER)) as owner, owner, owner.cursor() as cursor:
        cursor.execute(TABLE.replace("{writer}", databases.role_name(SinkRole.WRITER)))
    for file in PROJECTIONS.glob("*.sql"):
        text = file.read_text()
        (tmp_path / file.name).write_text(text.replace("\n-- [apply]\n", f"{REFUSE}\n-- [apply]\n"))
    made = Fates(databases, request.param, tmp_path)
    yield made
    made.close()


ALL = range(len(EVENTS))


@checked
@given(acts)
@example([Refuse({0}), Send([0]), Send([0]), Replay({0}), Refuse(()), Send([0]), Replay({0}), Send([0, 0])])
@example([Refuse({0}), Send([0, 0, 4, 1]), Discard({0}), Refuse(()), Send([0]), Send([0, 4], spoilt={0}), Replay(ALL)])
@example([Send([0]), Send([0], spoilt={0}), Replay({0}), Send([0])])
@example([Send([0], spoilt={0}), Send([0]), Replay({0}), Send([0])])
@example([Send([0], spoilt={0}), Refuse({0}), Send([0]), Replay({0}), Refuse(()), Send([0]), Replay({0}), Send([0])])
@example([Send([4], spoilt={4}), Send([0]), Replay({4}), Send([0, 4])])
@example([Send([0], spoilt={0}), Refuse({4}), Send([4]), Replay({0}), Refuse(()), Replay({4}), Send([0, 4])])
@example(
    [Refuse({4}), Send([0, 4]), Send([0, 4], back=2), Refuse(()), Send([4], back=1), Replay({4}), Send([4], back=1)]
)
@example([Send([1], spoilt={1}), Replay({1}), Send([1]), Replay({1}), Send([1, 1])])
@example([Send([0, 1], spoilt={0}), Send([0, 1], back=2), Replay({0})])
@example([Send([0]), Send([0, 0, 0], spoilt={0}), Replay({0}), Send([1], back=3)])
def test_each_event_has_the_fate_that_the_model_says(fates: Fates, things: list[Act]) -> None:
    fates.run(Model(fates.name), things)
