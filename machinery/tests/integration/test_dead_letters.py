"""Dead letters against a real Postgres: found, replayed each once, or given up for good."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from outbox.audit.sinks import acknowledged as acknowledged_by
from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.sink import discovery
from outbox.sink.remembering import fence
from outbox.sink.repair import replay
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Counts
from outbox_lab.testing import command
from outbox_lab.testing.failures import raises
from tests.support.kept_rows import cursor_of
from tests.support.made_events import STRATEGIES, TOPIC, Event, batch, dead_record, nth_key, sums, uuid7
from tests.support.record_corpus import unread
from tests.support.sink_driver import Database, open_sink, projections_in, replayed

RANDOM = Random(5)  # noqa: S311
Known = dict[str, SinkSpec]


def kilos(quantity: int = 7, version: int = 1, number: int = 1) -> Event:
    """An event whose id is new. Its total afterwards is right if it is the item's only one."""
    return Event(uuid7(RANDOM), nth_key(number), quantity, version, total_after=quantity)


def litres(event: Event) -> Event:
    """The event in another unit, which the projection refuses once the item has the first."""
    return replace(event, unit="LTR")


def set_aside(settings: Settings, *events: Event, name: str = "dedup") -> None:
    """Let a sink come by a record of each of these events, from offset 0 on, that it cannot read."""
    with open_sink(settings, name) as sink:
        sink.apply(batch([], dead=[unread(event, offset) for offset, event in enumerate(events)]))


@pytest.fixture
def known(databases: Settings) -> Known:
    return discovery.sinks(databases)


def with_projections(known: Known, folder: Path) -> Known:
    return {name: replace(one, job=replace(one.job, projections=folder)) for name, one in known.items()}


def run_replay(settings: Settings, known: Known, sink: str = "dedup") -> Replayed:
    """Replay all open letters of a sink."""
    return replayed(settings, known[sink])


def acknowledged(settings: Settings) -> frozenset[str]:
    """The identities of the records that `outbox check` no longer reports."""
    with cursor_of(settings, SinkRole.AUDITOR) as cursor:
        return acknowledged_by(cursor, ["dedup"])


def correct_unit(settings: Settings, unit: str = "LTR") -> None:
    """An operator's correction of a unit mismatch."""
    query(settings, SinkRole.WRITER, "UPDATE stock SET unit = %s", (unit,))


class TestReplay:
    def test_large_letters_are_few_in_a_transaction(
        self, databases: Settings, known: Known, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        some = [kilos(number=number) for number in range(4)]
        set_aside(databases, *some)
        with closing(connect(databases, SinkRole.WRITER)) as connection:
            (size_bytes, *_) = {chosen.size_bytes for chosen in Selection(sink="dedup").choose(connection)}
        monkeypatch.setattr(replay, "CHUNK_BYTES", 2 * size_bytes + 10)
        assert run_replay(databases, known) == Replayed(applied=4)
        transactions = database.query("SELECT count(*) FROM dead_letters GROUP BY last_seen_at")
        assert transactions == [(2,), (2,)]

    @pytest.mark.parametrize("name", STRATEGIES)
    def test_applies_a_refused_event_once_its_cause_is_corrected(
        self, databases: Settings, known: Known, name: str
    ) -> None:
        first = replace(kilos(5), total_after=5)
        refused = replace(litres(kilos(7, version=2)), total_after=12)
        database = Database(databases, name)
        with open_sink(databases, name) as sink:
            sink.apply(batch([first]))
            assert sink.apply(batch([refused], start=1)) == Counts(rows=1, rejected=1)
            correct_unit(databases)
            # A re-send is not applied beside its letter, be its cause gone or not.
            assert sink.apply(batch([refused, refused], start=2)) == Counts(2, 0, 2)
            assert database.totals() == sums([first])
            assert run_replay(databases, known, name) == Replayed(applied=1)
            assert run_replay(databases, known, name) == Replayed()
            assert sink.apply(batch([refused], start=4)) == Counts(1, 0, 1)
        assert database.totals() == sums([first, refused])
        assert database.statuses() == {refused.event_id: "replayed"}
        assert database.query("SELECT applied, duplicates FROM sinks") == [(2, 3)]

    @pytest.mark.parametrize("name", STRATEGIES)
    def test_an_event_that_has_meanwhile_come_well_is_not_applied_again(
        self, databases: Settings, known: Known, name: str
    ) -> None:
        late = kilos()
        with open_sink(databases, name) as sink:
            sink.apply(batch([], dead=[unread(late, 0)]))
            assert sink.apply(batch([late], start=1)).applied == 1
        assert Database(databases, name).statuses() == {late.event_id: "replayed"}
        assert run_replay(databases, known, name) == Replayed()
        assert Database(databases, name).totals() == sums([late])

    def test_killed_between_two_chunks_it_goes_on_where_it_was(
        self, databases: Settings, database: Database, known: Known, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replay, "CHUNK", 2)
        some = [kilos(3**number, version=number + 1) for number in range(5)]
        set_aside(databases, *some)
        taken: list[int] = []
        once = fence.lock

        def dies(cursor: object, name: str) -> None:
            taken.append(1)
            if len(taken) == 3:
                raise KeyboardInterrupt
            once(cursor, name)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(fence, "lock", dies)
            with pytest.raises(KeyboardInterrupt):
                run_replay(databases, known)
        assert database.totals() == sums(some[:4])
        assert run_replay(databases, known) == Replayed(applied=1)
        assert database.totals() == sums(some)


class TestBesideASink:
    def test_it_waits_for_the_transaction_of_the_sink(
        self, databases: Settings, database: Database, known: Known
    ) -> None:
        late = kilos()
        set_aside(databases, late)
        waits = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (" + (
            "SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        with ThreadPoolExecutor() as pool:
            with cursor_of(databases) as cursor:
                fence.lock(cursor, "dedup")
                running = pool.submit(run_replay, databases, known)
                wait_for("the replay to wait", lambda: bool(database.query(waits)), timeout_s=20)
                assert database.statuses() == {late.event_id: "open"}
            assert running.result() == Replayed(applied=1)

    def test_events_sent_again_while_two_replays_run_are_applied_once(
        self, databases: Settings, database: Database, known: Known, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replay, "CHUNK", 3)
        some = [kilos(3**number, version=number + 1, number=number % 3) for number in range(30)]

        def run_sink() -> None:
            for start in range(30, 300, 6):
                chosen = RANDOM.sample(some, 6)
                sink.apply(batch(chosen, start))

        def run_replays() -> None:
            for _ in range(3):
                run_replay(databases, known)

        with open_sink(databases) as sink, ThreadPoolExecutor() as pool:
            sink.apply(batch([], dead=[unread(event, offset) for offset, event in enumerate(some)]))
            for running in [pool.submit(run) for run in (run_sink, run_replays, run_replays)]:
                running.result()
        assert database.totals() == sums(some)
        assert database.statuses() == dict.fromkeys((event.event_id for event in some), "replayed")
        assert database.query("SELECT applied FROM sinks") == [(30,)]


class TestDiscard:
    @pytest.mark.parametrize("name", STRATEGIES)
    def test_what_was_discarded_is_not_applied_however_it_comes_again(
        self, databases: Settings, known: Known, name: str
    ) -> None:
        database = Database(databases, name)
        first, refused, late = kilos(5), litres(kilos(7, version=2)), kilos(9, number=2)
        with open_sink(databases, name) as sink:
            sink.apply(batch([first], dead=[unread(late, 1)]))
            sink.apply(batch([refused], start=2))
            assert database.discard() == 2
            assert database.discard() == 0
            correct_unit(databases)
            assert sink.apply(batch([refused, late, refused], start=3)) == Counts(3, 0, 3)
            sink.apply(batch([], start=6, dead=[unread(late, 6)]))
        assert run_replay(databases, known, name) == Replayed()
        assert database.totals() == sums([first])
        assert database.statuses() == {late.event_id: "discarded", refused.event_id: "discarded"}
        assert database.query("SELECT FROM dead_letters WHERE last_seen_at <= first_seen_at") == []

    def test_an_event_that_takes_the_letter_of_a_discarded_record_leaves_that_acknowledged(
        self, databases: Settings, known: Known, database: Database
    ) -> None:
        first, event = kilos(5), litres(kilos(7, version=2))
        foreign = dead_record(1, event.event_id)
        with open_sink(databases) as sink:
            sink.apply(batch([first], dead=[foreign]))
            assert database.discard() == 1
            assert sink.apply(batch([event], start=2)).rejected == 1
            assert acknowledged(databases) == set(), "its event is set aside"
            sink.apply(batch([], start=1, dead=[foreign]))
            assert database.query("SELECT status, is_event FROM dead_letters") == [("open", True)]
            correct_unit(databases)
            assert run_replay(databases, known) == Replayed(applied=1)
            sink.apply(batch([], start=1, dead=[foreign]))
        assert database.statuses() == {event.event_id: "replayed"}
        assert acknowledged(databases) == {event.event_id}


class TestRefusals:
    """The memory of a strategy after a batch in which the projection refuses an event."""

    @pytest.mark.parametrize("whose", ["gen_random_uuid()", "event_id"])
    def test_a_projection_may_only_refuse_new_events(
        self, databases: Settings, database: Database, known: Known, tmp_path: Path, whose: str
    ) -> None:
        """An event that is applied already must not become a dead letter, or its replay would apply it twice."""
        wrong = projections_in(
            tmp_path,
            f"-- [refuse]\nINSERT INTO rejections SELECT {whose}, 'no', 'no' FROM outbox_batch\n-- [apply]\nSELECT 1",
        )
        first, late = kilos(5, number=2), kilos()
        with open_sink(databases) as sink:
            sink.apply(batch([first]))
            sink.apply(batch([], start=1, dead=[unread(first, 1), unread(late, 2)]))
        with raises("projection-unusable", "dedup"):
            run_replay(databases, with_projections(known, wrong))
        assert database.statuses() == {first.event_id: "open", late.event_id: "open"}
        assert database.processed() == 1


class TestCommand:
    @pytest.fixture
    def letters(self, databases: Settings) -> Sequence[Event]:
        """One unread, one refused, one without any id, and the first of them in a second sink too."""
        late, refused = kilos(9, number=2), litres(kilos(7, version=2))
        nameless = dead_record(3, value=b"\xff", key=refused.key.encode(), reason="missing id")
        with open_sink(databases) as sink:
            sink.apply(batch([kilos(5)], dead=[unread(late, 1)]))
            sink.apply(batch([refused], start=2))
            sink.apply(batch([], start=3, dead=[nameless]))
        set_aside(databases, late, name="naive")
        return [late, refused]

    @staticmethod
    def run(settings: Settings, *arguments: str, status: int = 0) -> str:
        done = command.outbox("dead-letters", *arguments, home=settings.home, **settings.as_env())
        assert done.returncode == status, done.stderr
        assert len(done.stderr.splitlines()) == (1 if status == 1 else 0) or status == 2
        return done.stdout if status == 0 else done.stderr

    def test_list_and_show(self, databases: Settings, letters: Sequence[Event]) -> None:
        late, refused = letters

        def found(*arguments: str) -> list[tuple[str, str]]:
            """Sink and reason of each letter that is listed."""
            lines = [json.loads(line) for line in self.run(databases, "list", "--json", *arguments).splitlines()]
            return [(line["sink"], line["reason"]) for line in lines]

        unknown = "unknown schema version"
        dedups = [("dedup", unknown), ("dedup", "unit mismatch"), ("dedup", "missing id")]
        assert found() == found("--status", "all") == [*dedups, ("naive", unknown)]
        assert found("--sink", "dedup") == dedups
        assert found("--reason", "missing id") == dedups[2:]
        assert found(late.event_id.upper(), "--sink", "naive") == [("naive", unknown)]
        assert found("--key", refused.key) == dedups[1:]
        assert found("--status", "discarded") == []
        assert "dedup, naive" in self.run(databases, "show", late.event_id, status=1)
        assert "there is no dead letter x" in self.run(databases, "show", "x", status=1)
        shown = json.loads(self.run(databases, "show", late.event_id, "--sink", "dedup"))
        assert json.loads(shown["value"])["quantity"] == late.quantity
        assert (shown["key"], shown["topic"], shown["offset"]) == (late.key, TOPIC, 1)
        assert {"key": "id", "value": late.event_id} in shown["headers"]

    def test_key_of_a_record_controls_no_terminal(self, databases: Settings) -> None:
        letter = dead_record(0, value=b"{}", key=b"\x1b]0;title\x07\nstatus  discarded", reason="missing id")
        with open_sink(databases) as sink:
            sink.apply(batch([], dead=[letter]))
        identity = json.loads(self.run(databases, "list", "--json"))["identity"]
        (line,) = [line for line in self.run(databases, "show", identity).splitlines() if "title" in line]
        assert line.endswith(r'"\u001b]0;title\u0007\nstatus  discarded",')

    def test_replay_and_discard(self, databases: Settings, database: Database, letters: Sequence[Event]) -> None:
        late, refused = letters
        mine, because = ("--sink", "dedup"), ("--because", "looked at")
        for words in (["replay"], ["discard", *because]):
            assert "--all" in self.run(databases, *words, status=2)
        assert "'--because'" in self.run(databases, "discard", *mine, status=2)
        told = self.run(databases, "replay", *mine, "--reason", "unknown schema version")
        assert told == "sink dedup: replayed 1 (1 applied, 0 were applied already), 0 rejected again\n"
        assert "2 dead letters stay open" in self.run(databases, "replay", *mine, status=1)
        assert self.run(databases, "discard", *mine, *because) == "sink dedup: discarded 2\n"
        assert self.run(databases, "replay", *mine) == "no dead letters to replay\n"
        assert set(database.statuses().values()) == {"replayed", "discarded"}
        shown = json.loads(self.run(databases, "show", refused.event_id, *mine))
        assert (shown["status"], shown["resolution"]) == ("discarded", "looked at")
        assert set(Database(databases, "naive").statuses().values()) == {"open"}
        assert database.totals()[late.key] == late.quantity

    def test_letters_of_a_sink_that_is_gone_stay(self, databases: Settings, database: Database) -> None:
        gone, late = kilos(), kilos(number=2)
        set_aside(databases, gone)
        query(databases, SinkRole.WRITER, "UPDATE dead_letters SET sink = 'gone'")
        set_aside(databases, late)
        assert "gone" in self.run(databases, "replay", "--sink", "gone", status=1)
        self.run(databases, "replay", "--all")
        assert database.statuses() == {late.event_id: "replayed"}
        assert Database(databases, "gone").statuses() == {gone.event_id: "open"}
