"""Random choices that can be repeated."""

from __future__ import annotations

import random


def chosen_seed() -> int:
    """A seed for the random choices of a test, printed so that a failure can be repeated."""
    seed = random.randrange(10**6)  # noqa: S311
    print(f"seed: {seed}")  # noqa: T201
    return seed


def seeded(seed: int, number: int) -> random.Random:
    """The random choices of one of several clients."""
    return random.Random(f"{seed}/{number}")  # noqa: S311
