"""A target that is a function: called before the commit, for what is new, whatever it does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from outbox.audit import declared, sinks
from outbox.audit.sinks import SinkState
from outbox.audit.store import Store
from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, load
from outbox.events.schema import shortened
from outbox.kafka.topics import Topic
from outbox.maintenance import erase
from outbox.sink import discovery
from outbox.sink.applying.function import TARGET_REFUSED, FunctionTarget
from outbox.sink.repair import rebuild
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import SinkWriter
from outbox.targets import newest
from outbox_lab.testing.failures import raises
from tests import items, targets
from tests.support.made_events import MAIN, STRATEGIES, TOPIC, TOPIC_ID, Event, batch, nth_key, sums, uuid7
from tests.support.sink_driver import Database, driving, replayed

RANDOM = Random(47)  # noqa: S311
EVENTS = [Event(uuid7(RANDOM), nth_key(number % 3), 1 + number, number // 3 + 1) for number in range(12)]
SINK = "search"


def spec_of(function: str, strategy: str = "dedup") -> SinkSpec:
    target = FunctionTarget(f"{targets.__name__}:{function}")
    job = replace(MAIN.job, name=SINK, projections=Path("none"), target=target.name, strategy=strategy)
    return replace(MAIN, name=SINK, job=job, target=target, strategy=STRATEGIES[strategy])


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(targets.FILE, str(tmp_path / "target.db"))
    return tmp_path / "target.db"


def sink(
    settings: Settings, function: str, strategy: str = "dedup", *, name: str = SINK
) -> AbstractContextManager[SinkWriter]:
    return driving(settings, replace(spec_of(function, strategy), name=name))


def replay_letters(settings: Settings, function: str) -> Replayed:
    return replayed(settings, spec_of(function))


@pytest.mark.parametrize("strategy", ["dedup", "versions", "offsets"])
def test_new_events_are_written_and_repeated_ones_are_not(databases: Settings, strategy: str) -> None:
    with sink(databases, "write", strategy) as writer:
        assert writer.apply(batch(EVENTS[:6])).applied == 6
        again = writer.apply(batch(EVENTS, 0 if strategy == "offsets" else 6))
    assert (again.applied, again.duplicates) == (6, 6)
    assert targets.found() == sums(EVENTS)


def test_the_function_gets_new_events_alone_in_the_order_of_the_topic(
    databases: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = list[pa.Table]()
    monkeypatch.setattr(targets, "write", got.append)
    some = [replace(one, quantity=one.quantity * (-1) ** number) for number, one in enumerate(EVENTS)]
    with sink(databases, "write") as writer:
        writer.apply(batch([some[0], *some[:6]]))
        writer.apply(batch(some, 7))
        writer.apply(batch(some, 19))
    assert [one["event_id"].to_pylist() for one in got] == [
        [one.event_id for one in few] for few in (some[:6], some[6:])
    ], "and is not called for nothing"
    assert got[0]["offset"].to_pylist() == [0, 2, 3, 4, 5, 6]
    assert got[0]["event_type"].to_pylist() == [one.name for one in some[:6]]
    assert got[0].column_names == ["event_id", "partition", "offset", *(one.name for one in MAIN.layout.columns)]


def test_a_failure_commits_nothing_and_the_events_come_again(databases: Settings) -> None:
    thirteen = Event(uuid7(RANDOM), nth_key(1), targets.THIRTEEN, 9)
    with (
        pytest.raises(Failure, match=r"targets:fail failed in line") as failure,
        sink(databases, "fail") as writer,
    ):
        writer.apply(batch([*EVENTS, thirteen]))
    assert failure.value.code == "target-failed"
    database = Database(databases, SINK)
    assert (database.positions(), database.processed()) == ({}, 0)
    assert targets.found() == sums([*EVENTS, thirteen]), "it was written before"
    with sink(databases, "write") as writer:
        assert writer.apply(batch([*EVENTS, thirteen])).applied == 13
    assert targets.found() == sums([*EVENTS, thirteen])


def test_refused_events_are_set_aside_and_replayed(databases: Settings) -> None:
    thirteen = Event(uuid7(RANDOM), nth_key(1), targets.THIRTEEN, 9)
    with sink(databases, "refuse") as writer:
        counts = writer.apply(batch([*EVENTS[:5], thirteen, *EVENTS[5:]]))
    assert (counts.applied, counts.rejected) == (12, 1)
    database = Database(databases, SINK)
    assert database.dead_letters() == {thirteen.event_id: TARGET_REFUSED}
    assert targets.found() == sums(EVENTS)
    assert replay_letters(databases, "refuse") == Replayed(rejected=1)
    assert replay_letters(databases, "write") == Replayed(applied=1)
    assert targets.found() == sums([*EVENTS, thirteen])
    assert database.statuses() == {thirteen.event_id: "replayed"}


def test_a_reason_is_kept_in_short(databases: Settings) -> None:
    with sink(databases, "refuse_at_length") as writer:
        assert writer.apply(batch(EVENTS)).rejected == 12
    assert replay_letters(databases, "refuse_at_length") == Replayed(rejected=12)
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        details = {one["detail"] for one in Selection(sink=SINK).read(connection)}
    assert details == {shortened("a\0b\ud800" + "c" * 1_000_000)}


def test_a_batch_is_reduced_to_the_newest_version_of_each_key(databases: Settings) -> None:
    totals = dict[str, int]()
    some = list[Event]()
    for one in EVENTS:
        totals[one.key] = totals.get(one.key, 0) + one.quantity
        some.append(replace(one, total_after=totals[one.key]))
    with sink(databases, "write_newest") as writer:
        writer.apply(batch([*some[6:], *some[:3]]))
        writer.apply(batch(some[3:6], 9))
    assert targets.found() == sums(EVENTS)


@pytest.mark.parametrize(
    ("function", "code", "part"),
    [
        ("leave", "target-failed", "SystemExit"),
        ("count", "target-wrong", "int"),
        ("refuse_others", "target-wrong", "another"),
        ("later", "target-wrong", "generator"),
        ("nothing", "target-failed", "argument"),
        ("number", "sink-unusable", "no function"),
        ("missing", "sink-unusable", "missing"),
    ],
)
def test_what_is_no_target_is_named(databases: Settings, function: str, code: str, part: str) -> None:
    with raises(code, f"tests.targets:{function}", part), sink(databases, function) as writer:
        writer.apply(batch(EVENTS))
    assert Database(databases, SINK).applied() == 0


def test_an_error_repeats_no_personal_data(databases: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SinkSpec, "is_personal", True)
    with pytest.raises(Failure, match="ValueError") as failure, sink(databases, "fail") as writer:
        writer.apply(batch([*EVENTS, Event(uuid7(RANDOM), nth_key(1), targets.THIRTEEN, 9)]))
    assert "thirteen" not in str(failure.value)
    with pytest.raises(Failure, match="refuses") as failure, sink(databases, "refuse_others") as writer:
        writer.apply(batch(EVENTS))
    assert "another" not in str(failure.value)
    with sink(databases, "refuse") as writer:
        writer.apply(batch([Event(uuid7(RANDOM), nth_key(1), targets.THIRTEEN, 9)]))
    with closing(connect(databases, SinkRole.WRITER)) as connection:
        assert ["thirteen" in one["detail"] for one in Selection(sink=SINK).read(connection)] == [False]


def test_a_key_is_erased_by_the_functions_module(databases: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("write")
    with sink(databases, "write") as writer:
        writer.apply(batch(EVENTS))
    monkeypatch.setattr(discovery, "jobs", lambda _: [spec.job])
    key = EVENTS[0].key
    one = erase.subject(databases, items.AGGREGATE, key)
    place = f"target {spec.job.target}"
    assert erase.erase(databases, one, dry_run=True)[place] == 4
    assert key in targets.found()
    assert erase.erase(databases, one)[place] == 4
    assert key not in targets.found()
    with sink(databases, "write") as writer:
        writer.apply(batch(EVENTS, 12))
    assert key not in targets.found(), "it does not come back"
    monkeypatch.delattr(targets, "erase")
    assert place not in erase.erase(databases, one, dry_run=True)
    monkeypatch.setattr(one.sinks[0].decoders[TOPIC], "is_personal", True)
    with raises("erase-unsupported", "tests.targets:write"):
        erase.erase(databases, one, dry_run=True)


def test_a_copy_of_the_sink_fills_an_empty_place_again(databases: Settings, file: Path) -> None:
    spec = spec_of("write")
    with sink(databases, "write") as writer:
        writer.apply(batch(EVENTS))
    file.unlink()
    with raises("rebuild-unsupported", "--from topic"):
        spec.target.require_rebuildable(spec, "source")
    spec.target.require_rebuildable(spec, "topic")
    topics, first = [Topic(TOPIC, TOPIC_ID, 1)], {TOPIC: {0: 0}}
    with rebuild.reserved(databases, SINK) as connection:
        rebuild.begin(connection, SINK, topics, first)
        with sink(databases, "write", name=rebuild.copy_of(SINK)) as copy:
            copy.apply(batch(EVENTS))
        rebuild.swap(connection, SINK, topics, first)
    assert targets.found() == sums(EVENTS)
    with sink(databases, "write") as writer:
        assert writer.apply(batch(EVENTS, 12)).duplicates == 12


def test_check_reads_the_totals_at_positions_of_before(
    databases: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "comparisons").mkdir()
    (tmp_path / "comparisons" / "stock.sql").write_text("-- [source]\nSELECT key, total FROM source_totals")
    job = replace(spec_of("write").job, projections=tmp_path / "none")
    monkeypatch.setattr(discovery, "jobs", lambda _: [job])
    with sink(databases, "write") as writer, sink(databases, "write", name=rebuild.copy_of(SINK)) as copy:
        copy.apply(batch(EVENTS[:3]))
        writer.apply(batch(EVENTS[:6]))

        def states() -> Sequence[SinkState]:
            with closing(Store()) as store:
                return sinks.read(databases, declared.load(databases), store).states

        totals = targets.totals

        def totals_beside_a_batch() -> Sequence[tuple[str, int, int]]:
            writer.apply(batch(EVENTS[6:], 6))
            return totals()

        monkeypatch.setattr(targets, "totals", totals_beside_a_batch)
        live, beside = states()
        assert live.positions == {TOPIC: {0: 6}}
        assert live.may_be_ahead
        assert live.versions == {TOPIC: {one.key: 4 for one in EVENTS}}
        assert beside.not_compared, "it shares the place"
        monkeypatch.setattr(targets, "totals", lambda: [("a", "many", None)])
        with raises("target-failed", "tests.targets:write"):
            states()
        monkeypatch.delattr(targets, "totals")
        assert states()[0].not_compared


@pytest.mark.parametrize("source", ["def write(", "import sys; sys.exit(0)", "raise ValueError('a\\nb')"])
def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "broken_target.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    target, settings = FunctionTarget("broken_target:write"), load(environment=False)
    spec = replace(spec_of("write"), target=target)
    for use in (
        lambda: target.require_usable(spec),
        lambda: target.state(settings, spec),
        lambda: target.erase(settings, spec, TOPIC, "a", dry_run=True),
    ):
        with raises("sink-unusable", "broken_target:write", "cannot be imported"):
            use()


def test_totals_are_numbers_and_versions_are_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, target = spec_of("write"), FunctionTarget(f"{targets.__name__}:write")
    rows = [("a", "1.50", "2"), (5, None, None), ("b", 0.5, Decimal(7))]
    monkeypatch.setattr(targets, "totals", lambda: rows)
    assert [*target.totals(spec)] == [("a", Decimal("1.5"), 2), (5, Decimal(0), None), ("b", Decimal("0.5"), 7)]
    for row in [("a", "NaN", 1), ("a", float("inf"), 1), ("a", 1, 1.5), ("a", 1, float("nan")), ("a", 1)]:
        monkeypatch.setattr(targets, "totals", lambda row=row: [row])
        with raises("target-failed", "tests.targets:write"):
            list(target.totals(spec))


def test_any_version_is_newer_than_none() -> None:
    columns = {"row": ["a", "a", "b", "b"], "version": [2, None, None, 1], "partition": [0] * 4, "offset": [0, 1, 2, 3]}
    found = newest(pa.table(columns), key="row", version="version")
    assert found.select(["row", "version"]).to_pylist() == [{"row": "b", "version": 1}, {"row": "a", "version": 2}]


@pytest.mark.parametrize(
    ("returned", "code"), [(-1, "target-wrong"), ("many", "target-failed"), (["row"], "target-failed")]
)
def test_what_is_no_number_of_erased_rows_is_refused(
    monkeypatch: pytest.MonkeyPatch, returned: object, code: str
) -> None:
    spec, target = spec_of("write"), FunctionTarget(f"{targets.__name__}:write")
    monkeypatch.setattr(targets, "erase", lambda **_: returned)
    with raises(code, "tests.targets:write"):
        target.erase(load(environment=False), spec, TOPIC, "a", dry_run=True)
