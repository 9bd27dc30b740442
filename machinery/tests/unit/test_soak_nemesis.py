"""The nemesis: a seed decides the order of faults, and their cost how many there are."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import pytest

from outbox.base.settings import load
from outbox.base.wait import nothing
from outbox_lab.soak import nemesis, testbed
from outbox_lab.soak.fault import Fault, Strike, wait_or_not_fired
from outbox_lab.soak.faults import FAULTS
from outbox_lab.soak.nemesis import Nemesis, Watch
from outbox_lab.testing import chosen_seed


def test_a_seed_decides_the_order() -> None:
    seed = chosen_seed()
    first, second = (list(islice(nemesis.draws(seed, FAULTS, 5), 200)) for _ in range(2))
    assert first == second != list(islice(nemesis.draws(seed + 1, FAULTS, 5), 200))
    assert {one.is_beside for one in first} == {False, True}, "some begin beside others, and some alone"


def test_every_fault_comes_before_one_comes_again() -> None:
    count = len(FAULTS)
    names = [one.fault for one in islice(nemesis.draws(chosen_seed(), FAULTS, 5), 2 * count)]
    assert set(names[:count]) == set(names[count:]) == set(FAULTS)


def test_every_part_that_a_fault_names_exists() -> None:
    for name, fault in FAULTS.items():
        assert {*fault.parts, *fault.needs} <= set(testbed.PARTS), name
        assert not {*fault.parts} & {*fault.needs}, name


@pytest.fixture
def unstarted(tmp_path: Path) -> testbed.Testbed:
    """One that is not started: the faults of these tests break nothing."""
    return testbed.Testbed(load(tmp_path, environment=False), [])


def happen(_: Strike) -> str:
    return "it happened"


def miss(_: Strike) -> str:
    return wait_or_not_fired("somebody to be there", lambda: None, timeout_s=0.01)


def happen_slowly(_: Strike) -> str:
    time.sleep(0.5)
    return "it happened"


def look_at_broker(strike: Strike) -> str:
    with strike.testbed.free("kafka") as is_free:
        return "" if is_free else "the broker was held"


def fail_to_heal(_: Strike) -> None:
    raise RuntimeError("it stays broken")


QUICK = Fault("quick", "Happens, and is over.", happen, parts=("service",))
LONG = replace(QUICK, name="long", lasts_s=(600.0, 600.0))


def injected(
    bed: testbed.Testbed, *faults: Fault, duration_s: float = 0.5, pause_s: float = 0.02, watch: Watch = nothing
) -> Nemesis:
    """The nemesis after a run with these faults."""
    breaker = Nemesis(bed, {one.name: one for one in faults}, chosen_seed(), print)
    breaker.run(duration_s, pause_s, watch)
    return breaker


def test_what_a_fault_breaks_is_kept_apart_from_what_it_needs(unstarted: testbed.Testbed) -> None:
    breaker = injected(unstarted, replace(QUICK, inject=look_at_broker, needs=("kafka",)), duration_s=0.2, pause_s=0)
    assert {(one.evidence, one.parts) for one in breaker.injections} == {("the broker was held", ("service",))}


def test_no_fault_begins_after_the_deadline(unstarted: testbed.Testbed) -> None:
    breaker = injected(unstarted, replace(QUICK, inject=happen_slowly), duration_s=0.7, pause_s=0)
    assert all(one.fired_s < 0.7 and one.is_healed for one in breaker.injections)
    assert 1 <= len(breaker.injections) <= 2
    assert not injected(unstarted, QUICK, duration_s=0.1, pause_s=10).injections, "there was no time for one"


@pytest.mark.parametrize(
    ("other", "evidence"),
    [
        (replace(QUICK, name="other", is_possible=lambda _: False), {"quick": True}),
        (replace(QUICK, name="other", inject=miss), {"quick": True, "other": False}),
    ],
    ids=["impossible", "missed"],
)
def test_a_fault_that_does_not_happen(unstarted: testbed.Testbed, other: Fault, evidence: dict[str, bool]) -> None:
    """One that could not happen is left out, and one that should have has no evidence."""
    breaker = injected(unstarted, QUICK, other)
    assert {one.fault: bool(one.evidence) for one in breaker.injections} == evidence


def _seed_of_one_at_a_time() -> int:
    """With it the second fault does not begin while the first one lasts."""

    def is_beside(seed: int) -> bool:
        _, second = islice(nemesis.draws(seed, {"quick": QUICK}, pause_s=0.02), 2)
        return second.is_beside

    return next(seed for seed in count(chosen_seed()) if not is_beside(seed))


def test_the_watch_ends_a_run_and_keeps_what_has_happened(unstarted: testbed.Testbed) -> None:
    has_happened = threading.Event()

    def watch() -> None:
        if has_happened.is_set():
            raise ValueError("a client has died")

    breaker = Nemesis(unstarted, {"quick": QUICK}, _seed_of_one_at_a_time(), lambda _: has_happened.set())
    with pytest.raises(ValueError, match="a client has died"):
        breaker.run(duration_s=60, pause_s=0.02, watch=watch)
    assert [one.evidence for one in breaker.injections] == ["it happened"]


def test_run_ended_early_heals_lasting_faults_and_begins_no_more(unstarted: testbed.Testbed) -> None:
    def watch() -> None:
        if breaker.lasting:
            breaker.end()

    breaker = Nemesis(unstarted, {"long": LONG}, chosen_seed(), print)
    breaker.run(duration_s=600, pause_s=0.02, watch=watch)
    assert [(one.evidence, one.is_healed, one.is_broken_off) for one in breaker.injections] == [
        ("it happened", True, False)
    ]


def test_lasting_fault_at_the_end_of_a_run_is_not_unhealable(unstarted: testbed.Testbed) -> None:
    lasting: list[str] = []

    def watch() -> None:
        if breaker.lasting and said:
            lasting.extend(breaker.lasting)
            raise ValueError("a client has died")

    said: list[str] = []
    breaker = Nemesis(unstarted, {"long": replace(LONG, heal=fail_to_heal)}, chosen_seed(), said.append)
    with pytest.raises(ValueError, match="a client has died"):
        breaker.run(duration_s=60, pause_s=0.02, watch=watch)
    assert [(one.is_healed, one.is_broken_off) for one in breaker.injections] == [(False, True)]
    assert (lasting, breaker.lasting) == (["long"], [])
