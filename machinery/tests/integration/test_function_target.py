"""A target that is a function: called before the commit, for what is new, whatever it does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from outbox.audit import declared, sinks
from outbox.audit.report import SinkReport
from outbox.audit.sinks import SinkState
from outbox.audit.store import Store
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.maintenance import erase
from outbox.sink import discovery
from outbox.sink.applying.function import TARGET_REFUSED, FunctionTarget
from outbox.sink.repair import rebuild
from outbox.sink.repair.replay import Replayed
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import SinkWriter
from outbox_lab.testing.failures import raises
from tests import items, targets
from tests.support.made_events import MAIN, STRATEGIES, TOPIC, Event, batch, nth_key, sums, uuid7
from tests.support.sink_driver import Database, driving, replayed

RANDOM = Random(47)  # noqa: S311
EVENTS = [Event(uuid7(RANDOM), nth_key(number % 3), 1 + number, number // 3 + 1) for number in range(12)]
SINK = "search"


def spec_of(function: str, strategy: str = "dedup") -> SinkSpec:
    target = FunctionTarget(f"{targets.__name__}:{function}")
    job = replace(MAIN.job, name=SINK, projections=Path("none"), target=target.name, strategy=strategy)
    return replace(MAIN, name=SINK, job=job, target=target, strategy=STRATEGIES[strategy])


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(targets.FILE, str(tmp_path / "target.db"))


def sink(
    settings: Settings, function: str, strategy: str = "dedup", *, name: str = SINK
) -> AbstractContextManager[SinkWriter]:
    return driving(settings, replace(spec_of(function, strategy), name=name))


@pytest.fixture
def declared_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only job of the project, with a comparison."""
    (tmp_path / "comparisons").mkdir()
    (tmp_path / "comparisons" / "stock.sql").write_text("-- [source]\nSELECT key, total FROM source_totals")
    job = replace(spec_of("write").job, projections=tmp_path / "none")
    monkeypatch.setattr(discovery, "jobs", lambda _: [job])


def states(settings: Settings) -> Sequence[SinkState]:
    """The sinks as `outbox check` reads them."""
    with closing(Store()) as store:
        return sinks.read(settings, declared.load(settings), store).states


@pytest.mark.parametrize("strategy", ["dedup", "versions"])
def test_the_function_gets_new_events_alone_in_the_order_of_the_topic(
    databases: Settings, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    got = list[pa.Table]()
    monkeypatch.setattr(targets, "write", got.append)
    some = [replace(one, quantity=one.quantity * (-1) ** number) for number, one in enumerate(EVENTS)]
    with sink(databases, "write", strategy) as writer:
        writer.apply(batch([some[0], *some[:6]]))
        again = writer.apply(batch(some, 7))
        assert (again.applied, again.duplicates) == (6, 6)
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


@pytest.mark.usefixtures("declared_job")
def test_refused_events_are_set_aside_and_replayed(databases: Settings) -> None:
    thirteen = Event(uuid7(RANDOM), nth_key(1), targets.THIRTEEN, 9)
    with sink(databases, "refuse") as writer:
        counts = writer.apply(batch([*EVENTS[:5], thirteen, *EVENTS[5:]]))
    assert (counts.applied, counts.rejected) == (12, 1)
    database = Database(databases, SINK)
    assert database.dead_letters() == {thirteen.event_id: TARGET_REFUSED}
    [state] = states(databases)
    assert [*state.letters] == [thirteen.event_id]
    assert targets.found() == sums(EVENTS)
    assert replayed(databases, spec_of("refuse")) == Replayed(rejected=1)
    assert replayed(databases, spec_of("write")) == Replayed(applied=1)
    assert targets.found() == sums([*EVENTS, thirteen])
    assert database.statuses() == {thirteen.event_id: "replayed"}
    [state] = states(databases)
    assert state.letters == {}, "check does not count it as set aside"


@pytest.mark.parametrize(
    ("function", "code", "part"),
    [
        ("leave", "target-failed", "SystemExit"),
        ("count", "target-wrong", "int"),
        ("refuse_others", "target-wrong", "another"),
        ("number", "sink-unusable", "no function"),
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
    [(detail,)] = Database(databases, SINK).query("SELECT detail FROM dead_letters")
    assert "thirteen" not in str(detail)


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


@pytest.mark.usefixtures("declared_job")
def test_check_reads_the_totals_at_positions_of_before(databases: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with sink(databases, "write") as writer, sink(databases, "write", name=rebuild.copy_of(SINK)) as copy:
        copy.apply(batch(EVENTS[:3]))
        writer.apply(batch(EVENTS[:6]))
        totals = targets.totals

        def totals_beside_a_batch() -> Sequence[tuple[str, int, int]]:
            writer.apply(batch(EVENTS[6:], 6))
            return totals()

        monkeypatch.setattr(targets, "totals", totals_beside_a_batch)
        live, beside = states(databases)
        assert live.positions == {TOPIC: {0: 6}}
        assert live.may_be_ahead
        assert live.versions == {TOPIC: {one.key: 4 for one in EVENTS}}
        assert beside.not_compared, "it shares the place"


@pytest.mark.usefixtures("declared_job")
def test_a_target_that_cannot_be_read_is_a_finding(databases: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with sink(databases, "write") as writer:
        writer.apply(batch(EVENTS[:3]))
    monkeypatch.setattr(targets, "totals", lambda: [("a", "many", None)])
    [state] = states(databases)
    [finding] = SinkReport.of(state).findings
    assert (finding.code, finding.sink) == ("target-unreadable", SINK)
    assert "tests.targets:write" in finding.message
    monkeypatch.delattr(targets, "totals")
    [state] = states(databases)
    assert state.not_compared
    assert SinkReport.of(state).findings == [], "that is known"
