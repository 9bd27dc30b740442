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
    steps, first = pytestconfig.getoption("--steps", MINUTE), pytestconfig.getoption("--seed", 0)
    Attack.world = world
    began = time.monotonic()
    chosen = settings(
        max_examples=max(1, min(ROUND, steps) // EXAMPLE),
        stateful_step_count=EXAMPLE,
        deadline=None,
        derandomize=False,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    for seed in range(first, first + -(-steps // ROUND)):
        Attack._hypothesis_internal_use_seed = seed
        try:
            run_state_machine_as_test(Attack, settings=chosen)
        finally:  # after a failure the steps of shrinking are counted too
            with capsys.disabled():
                print(f"\nseed {seed}: {Attack.steps:,} steps in {time.monotonic() - began:.0f} s", end="")  # noqa: T201
    world.close()
