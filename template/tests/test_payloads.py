"""The typed payloads of each sample are those of its events."""

from __future__ import annotations

from pathlib import Path

import pytest
from outbox.base.project import Project
from outbox.events import catalog
from outbox_lab.events import payloads

from template.tests.paths import ROOT


@pytest.mark.parametrize("sample", [".", "examples/shop", "examples/async", "template/minimal"])
def test_the_typed_payloads_of_a_sample_are_not_stale(sample: str) -> None:
    project = Project(Path(ROOT, sample))
    assert payloads.file(project).exists()
    assert payloads.check(project, catalog.load(project.events, "any")) == []
