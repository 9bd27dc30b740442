"""How long the operations go on; `make attack` says it."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attack")
    group.addoption("--steps", type=int, default=1_200, help="how many steps, instead of those of a minute")
    group.addoption("--seed", type=int, default=0, help="another seed; without it the steps are the same each time")
