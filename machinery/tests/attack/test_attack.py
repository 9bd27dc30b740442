"""Operations at random against a sink on a real Postgres: a minute with a fixed seed; `make attack` for hours."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import engine
from hypothesis.stateful import run_state_machine_as_test

from outbox.base.settings import Settings
from tests.attack.machine import Attack
from tests.attack.world import World

MINUTE = 1_200  # steps
ROUND = 3_000  # steps between two lines of progress
EXAMPLE = 25  # steps
SHRINKING_S = 60


@pytest.fixture
def world(databases: Settings, tmp_path: Path) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "MAX_SHRINKING_SECONDS", SHRINKING_S)
        yield World(databases, tmp_path, patch)


@pytest.mark.timeout(0)
def test_random_operations_do_what_the_model_says(
    world: World, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = pytestconfig.getoption("--steps", None) or MINUTE
    first = pytestconfig.getoption("--seed", None)
    began = time.monotonic()

    class Machine(Attack):
        pass

    Machine.world = world
    Machine.without = pytestconfig.getoption("--without", "").split(",")
    for number in range(-(-steps // ROUND)):
        seed = None if first is None else first + number
        Machine._hypothesis_internal_use_seed = seed or number
        chosen = settings(
            max_examples=max(1, min(ROUND, steps) // EXAMPLE),
            stateful_step_count=EXAMPLE,
            deadline=None,
            derandomize=False,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        try:
            run_state_machine_as_test(Machine, settings=chosen)
        except BaseException:
            with capsys.disabled():
                print(f"\nseed {seed or number}: found something after {Machine.steps:,} steps, shrinking included")  # noqa: T201
            raise
        passed_s = time.monotonic() - began
        with capsys.disabled():
            print(f"\nseed {seed or number}: {Machine.steps:,} steps in {passed_s:.0f} s", end="")  # noqa: T201
    world.close()
