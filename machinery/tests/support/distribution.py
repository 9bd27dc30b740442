"""How the machinery's tests are distributed among several processes, each with a stack of its own."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from xdist.scheduler import LoadScopeScheduling

# What takes long in one process begins first: files with a stack of their own, then the chain, then short tests.
FIRST = (
    *("faults/", "recovery/test_kafka.py", "integration/test_stack.py", "pipeline/test_bring_your_own.py"),
    *("pipeline/", "recovery/", "integration/"),
)
# Tests of the chain that share no fixture of their file: whichever process is free takes the next one.
SPREAD = frozenset(
    f"pipeline/test_{name}.py"
    for name in (
        *("check", "doctor", "hostile_events", "rebuild", "relay", "relay_log", "retention", "rewind", "rollout"),
        *("sink_limits", "sink_stream", "sink_stream_failures", "strategies", "trace", "warm_jvm"),
    )
) | {"recovery/test_relay.py", "recovery/test_sinks.py", "recovery/test_source.py"}
SUITE = "tests/"


def order(items: list[pytest.Item]) -> None:
    """Put the tests into the order in which they begin."""
    items.sort(key=lambda item: _rank(item.nodeid))


class Distribution(LoadScopeScheduling):  # type: ignore[misc]  # without type hints
    """The tests of a file run in one process, one after the other, except those that are spread."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if file.rpartition(SUITE)[2] in SPREAD else file


def _rank(nodeid: str) -> int:
    below = nodeid.rpartition(SUITE)[2]
    ranks: Iterable[int] = (rank for rank, beginning in enumerate(FIRST) if below.startswith(beginning))
    return next(iter(ranks), len(FIRST))
