"""Without a cluster, the soak kills no executor."""

from __future__ import annotations

from pathlib import Path

from outbox.base.settings import load
from outbox.soak import testbed
from outbox.soak.faults.executors import ExecutorKilled


def test_without_a_cluster_no_executor_is_killed(tmp_path: Path) -> None:
    assert not ExecutorKilled().is_possible(testbed.Testbed(load(tmp_path, environment=False), []))
