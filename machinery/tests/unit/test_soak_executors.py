"""Without a cluster, the soak kills nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox.base.settings import load
from outbox_lab.soak import testbed
from outbox_lab.soak.fault import Make
from outbox_lab.soak.faults import executors, merges


@pytest.mark.parametrize("make", [*executors.FAULTS, *merges.FAULTS], ids=lambda make: make.name)
def test_without_a_cluster_it_is_impossible(make: Make, tmp_path: Path) -> None:
    assert not make().is_possible(testbed.Testbed(load(tmp_path, environment=False), []))
