"""The schedule of faults that a seed decides."""

from __future__ import annotations

from itertools import pairwise

from outbox.soak import nemesis
from outbox.soak.faults import every
from outbox.testing import chosen_seed


def test_a_seed_decides_the_schedule() -> None:
    seed = chosen_seed()
    first, second = (nemesis.schedule(seed, every(), 600, 5) for _ in range(2))
    assert first == second != nemesis.schedule(seed + 1, every(), 600, 5)


def test_every_fault_comes_before_one_comes_again() -> None:
    planned = nemesis.schedule(chosen_seed(), every(), 3_600, 5)
    names = [one.fault for one in planned]
    assert set(names[: len(every())]) == set(every())


def test_faults_begin_in_order_and_end_in_time_and_some_overlap() -> None:
    planned = nemesis.schedule(chosen_seed(), every(), 3_600, 5)
    assert all(one.at_s <= other.at_s for one, other in pairwise(planned))
    assert all(one.at_s + one.lasts_s <= 3_600 for one in planned)
    assert any(one.at_s + one.lasts_s > other.at_s for one, other in pairwise(planned))


def test_without_time_there_is_no_fault() -> None:
    assert not nemesis.schedule(1, every(), 0.5, 5)
