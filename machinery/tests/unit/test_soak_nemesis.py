"""The nemesis: a seed decides the order of faults, and their cost how many there are."""

from __future__ import annotations

import random
import threading
import time
from itertools import count, islice
from pathlib import Path

import pytest

from outbox.base.settings import load
from outbox_lab.soak import nemesis, run, testbed
from outbox_lab.soak.checkers.faults import not_happened
from outbox_lab.soak.fault import Fault, NoChance, NotFired, wait_or_not_fired
from outbox_lab.soak.faults import every
from outbox_lab.soak.history import Attempt, Recorder
from outbox_lab.soak.nemesis import Nemesis
from outbox_lab.testing import chosen_seed


def test_a_seed_decides_the_order() -> None:
    seed = chosen_seed()
    first, second = (list(islice(nemesis.draws(seed, every(), 5), 200)) for _ in range(2))
    assert first == second != list(islice(nemesis.draws(seed + 1, every(), 5), 200))


def test_every_fault_comes_before_one_comes_again() -> None:
    count = len(every())
    names = [one.fault for one in islice(nemesis.draws(chosen_seed(), every(), 5), 2 * count)]
    assert set(names[:count]) == set(names[count:]) == set(every())


def test_some_faults_begin_beside_others_and_some_alone() -> None:
    assert {one.is_beside for one in islice(nemesis.draws(chosen_seed(), every(), 5), 200)} == {False, True}


@pytest.fixture
def unstarted(tmp_path: Path) -> testbed.Testbed:
    """One that is not started: the faults of these tests break nothing."""
    return testbed.Testbed(load(tmp_path, environment=False), [])


class Quick(Fault):
    """Happens, and is over."""

    name = "quick"
    parts = ("service",)

    def fire(self, testbed: testbed.Testbed, chance: random.Random) -> str:
        del testbed, chance
        return "it happened"


class Missed(Quick):
    """Does not happen."""

    name = "missed"

    def fire(self, testbed: testbed.Testbed, chance: random.Random) -> str:
        del testbed, chance
        raise NotFired("nobody was there")


class Left(Quick):
    """Cannot happen as things are."""

    name = "left"

    def fire(self, testbed: testbed.Testbed, chance: random.Random) -> str:
        del testbed, chance
        raise NoChance("there is nothing to break")


class Slow(Quick):
    """Costs more time than the run has."""

    name = "slow"

    def fire(self, testbed: testbed.Testbed, chance: random.Random) -> str:
        del testbed, chance
        time.sleep(0.5)
        return "it happened"


class Needing(Quick):
    """Happens while nobody else breaks the broker."""

    name = "needing"
    needs = ("kafka",)

    def fire(self, testbed: testbed.Testbed, chance: random.Random) -> str:
        del chance
        with testbed.free("kafka") as is_free:
            return "" if is_free else "the broker was held"


def test_what_a_fault_breaks_is_kept_apart_from_what_it_needs(unstarted: testbed.Testbed) -> None:
    breaker = Nemesis(unstarted, {"needing": Needing}, chosen_seed(), print)
    breaker.run(duration_s=0.2, pause_s=0)
    assert {(one.evidence, one.parts, one.held) for one in breaker.injections} == {
        ("the broker was held", ("service",), ("kafka",))
    }


def test_every_part_that_a_fault_names_exists() -> None:
    for name, make in every().items():
        fault = make()
        assert {*fault.parts, *fault.needs} <= set(testbed.PARTS), name
        assert not {*fault.parts} & {*fault.needs}, name


def test_a_wait_that_ends_in_vain_means_that_a_fault_has_not_happened() -> None:
    assert wait_or_not_fired("the evidence", lambda: "seen", timeout_s=1) == "seen"
    with pytest.raises(NotFired, match="the evidence"):
        wait_or_not_fired("the evidence", lambda: None, timeout_s=0.01)


def test_no_fault_begins_after_the_deadline(unstarted: testbed.Testbed) -> None:
    breaker = Nemesis(unstarted, {"slow": Slow}, chosen_seed(), print)
    breaker.run(duration_s=0.7, pause_s=0)
    assert breaker.injections, "there was room for one"
    assert all(one.fired_s < 0.7 and one.is_healed for one in breaker.injections)
    assert len(breaker.injections) <= 2


def test_without_time_there_is_no_fault(unstarted: testbed.Testbed) -> None:
    breaker = Nemesis(unstarted, {"quick": Quick}, 1, print)
    breaker.run(duration_s=0.1, pause_s=10)
    assert not breaker.injections
    assert not_happened(["quick"], breaker.injections) == ["quick"]


class Impossible(Quick):
    """Cannot happen here."""

    name = "impossible"

    def is_possible(self, testbed: testbed.Testbed) -> bool:
        del testbed
        return False


def test_an_impossible_fault_is_never_drawn(unstarted: testbed.Testbed) -> None:
    said: list[str] = []
    breaker = Nemesis(unstarted, {"quick": Quick, "impossible": Impossible}, chosen_seed(), said.append)
    breaker.run(duration_s=0.5, pause_s=0.02)
    assert {one.planned.fault for one in breaker.injections} == {"quick"}
    assert not_happened(["quick"], breaker.injections) == []
    assert "impossible" in said[0]


def test_a_fault_without_evidence_has_not_happened(unstarted: testbed.Testbed) -> None:
    breaker = Nemesis(unstarted, {"quick": Quick, "missed": Missed}, chosen_seed(), print)
    breaker.run(duration_s=0.5, pause_s=0.02)
    assert {one.planned.fault: bool(one.evidence) for one in breaker.injections} == {"quick": True, "missed": False}
    assert not_happened(["missed", "quick"], breaker.injections) == ["missed"]


def test_a_fault_without_a_chance_is_left_out(unstarted: testbed.Testbed) -> None:
    breaker = Nemesis(unstarted, {"quick": Quick, "left": Left}, chosen_seed(), print)
    breaker.run(duration_s=0.5, pause_s=0.02)
    assert {one.planned.fault for one in breaker.injections} == {"quick"}
    assert not_happened(["left", "quick"], breaker.injections) == ["left"]


def _seed_of_one_at_a_time() -> int:
    """With it the second fault does not begin while the first one lasts."""

    def is_beside(seed: int) -> bool:
        _, second = islice(nemesis.draws(seed, {"quick": Quick}, pause_s=0.02), 2)
        return second.is_beside

    return next(seed for seed in count(chosen_seed()) if not is_beside(seed))


def test_the_watch_ends_a_run_and_keeps_what_has_happened(unstarted: testbed.Testbed) -> None:
    has_happened = threading.Event()

    def report(text: str) -> None:
        has_happened.set()

    def watch() -> None:
        if has_happened.is_set():
            raise ValueError("a client has died")

    breaker = Nemesis(unstarted, {"quick": Quick}, _seed_of_one_at_a_time(), report)
    with pytest.raises(ValueError, match="a client has died"):
        breaker.run(duration_s=60, pause_s=0.02, watch=watch)
    assert [one.evidence for one in breaker.injections] == ["it happened"]


class Long(Quick):
    """Lasts for longer than anybody waits."""

    name = "long"
    lasts_s = (600.0, 600.0)


def test_run_ended_early_heals_lasting_faults_and_begins_no_more(unstarted: testbed.Testbed) -> None:
    def watch() -> None:
        if breaker.lasting:
            breaker.end()

    breaker = Nemesis(unstarted, {"long": Long}, chosen_seed(), print)
    breaker.run(duration_s=600, pause_s=0.02, watch=watch)
    assert [(one.evidence, one.is_healed, one.is_broken_off) for one in breaker.injections] == [
        ("it happened", True, False)
    ]


class Unhealed(Long):
    """Lasts as long, and cannot be healed."""

    name = "unhealed"

    def heal(self, testbed: testbed.Testbed) -> None:
        del testbed
        raise RuntimeError("it stays broken")


def test_lasting_fault_at_the_end_of_a_run_is_not_unhealable(unstarted: testbed.Testbed) -> None:
    said: list[str] = []

    def watch() -> None:
        if breaker.lasting and said:
            said.append(f"now: {', '.join(breaker.lasting)}")
            raise ValueError("a client has died")

    breaker = Nemesis(unstarted, {"unhealed": Unhealed}, chosen_seed(), said.append)
    with pytest.raises(ValueError, match="a client has died"):
        breaker.run(duration_s=60, pause_s=0.02, watch=watch)
    assert [(one.is_healed, one.is_broken_off) for one in breaker.injections] == [(False, True)]
    assert "now: unhealed" in said
    assert breaker.lasting == []


def test_progress_says_what_was_sent_and_what_is_broken(
    unstarted: testbed.Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path / "history.jsonl")
    for status in (201, 409, None):
        recorder.add(Attempt(0, "order", "POST", "/orders", None, None, 0.0, 1.0, status))
    recorder.close()
    breaker = Nemesis(unstarted, {"quick": Quick}, chosen_seed(), print)
    breaker.run(duration_s=0.1, pause_s=0.0)
    line = run.progress(recorder, breaker)
    assert line.startswith("3 requests: 1 ok, 1 failed, 1 unknown")
    assert f"{len(breaker.injections)} faults" in line
    assert "no fault" in line
    said: list[str] = []
    run.sparse(said.append)(line)
    assert said == [], "a minute has not passed"
    monkeypatch.setattr(run, "REPORTED_EVERY_S", 0.0)
    run.sparse(said.append)(line)
    assert said == [line]
