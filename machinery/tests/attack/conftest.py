"""How long the operations go on; `make attack` says it."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.attack.machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attack")
    group.addoption("--steps", type=int, help="how many steps, instead of those of a minute")
    group.addoption("--seed", type=int, help="another seed; without it the steps are the same each time")
    group.addoption("--without", default="", help="rules to leave out, with commas between: see `Attack.on`")
