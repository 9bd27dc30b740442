"""A replay beside a running sink: it also replays the events that the sink parks meanwhile, behind the letters."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.decoding.records import Record
from outbox.sink.repair import replay
from outbox.sink.repair.replay import Replayed, Selection
from tests.seen import ORDERED, Seen, create_tables
from tests.support.declared import TOML, Events, payload
from tests.support.declared_sinks import record

TOPIC = "shop.order"
UNREADABLE = record("placed", {"id": "a", "number": "one"}, event_id="01a1fc75-167d-7239-af57-d1ee1a62e0a6")


@pytest.fixture
def seen(databases: Settings, tmp_path: Path) -> Seen:
    """A sink whose projection needs order. It has an unreadable event of the key a."""
    create_tables(databases)
    known = Events(tmp_path / "events").aggregate("order", TOML, placed_v1=payload()).load()
    made = Seen(databases, tmp_path, known, ["order"], projection=ORDERED)
    made.apply(TOPIC, UNREADABLE, record("placed", {"id": "a", "number": 2}))
    return made


def run_replay(seen: Seen, *meanwhile: Record) -> Replayed:
    """Replay the unreadable event with what is parked behind it. When they are chosen, the sink applies others."""
    with closing(connect(seen.settings, SinkRole.WRITER)) as connection:
        chosen = Selection(reason="schema violation").choose(connection, with_parked=True)
        seen.apply(TOPIC, *meanwhile)
        known = {seen.spec.name: seen.spec}
        (done,) = replay.replay(connection, known, chosen, applier_of=PostgresApplier).values()
        return done


def correct(seen: Seen) -> None:
    """Make the event readable."""
    seen.query("UPDATE dead_letters SET value = %s WHERE NOT is_event", b'{"id": "a", "number": 1}')


def placed(key: str, number: int) -> Record:
    return record("placed", {"id": key, "number": number})


@pytest.mark.parametrize("count", [1, 5])
def test_what_is_parked_meanwhile_follows(seen: Seen, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(replay, "CHUNK_BYTES", 500)  # of some two letters
    correct(seen)
    more = [placed("a", 3 + number) for number in range(count)]
    assert run_replay(seen, *more, placed("b", 1)) == Replayed(applied=2 + count)
    assert seen.events("id", "number") == [("b", 1), *(("a", 1 + number) for number in range(2 + count))]
    seen.apply(TOPIC, placed("a", 3 + count))
    assert seen.events("number")[-1] == (3 + count,), "nothing blocks the key any more"


def test_behind_a_letter_that_stays_open_it_stays(seen: Seen) -> None:
    assert run_replay(seen, placed("a", 3)) == Replayed(rejected=3), "each is tried once"
    assert seen.letters("reason") == [("schema violation",), ("parked",), ("parked",)]


def test_what_is_parked_of_other_keys_stays(seen: Seen) -> None:
    correct(seen)
    other = record("placed", {"id": "b", "number": "one"})
    assert run_replay(seen, other, placed("b", 2)) == Replayed(applied=2)
    assert seen.letters("status", "reason")[2:] == [("open", "schema violation"), ("open", "parked")]
