"""Which suite runs, and so which project it runs on: the fixture domain, or the sample."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.base import project
from outbox.testing import homes
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from tests.support.shape import Shape

DOMAIN = ROOT / "tests" / "machinery" / "domain"
FIXTURES = (
    "outbox.testing.plugin",
    "tests.fixtures.made_events",
    "tests.fixtures.whole_day",
    "tests.fixtures.secured",
    "tests.fixtures.hdfs",
    "tests.fixtures.object_store",
)


def choose(root: Path) -> None:
    """Let this process, and those that it starts, work for a project. A suite's conftest does so before all else."""
    os.environ[project.VARIABLE] = str(root)
    os.environ.setdefault(homes.VARIABLE, str(ROOT / ".outbox" / "tests"))
    project.make_importable()


def shape() -> Shape:
    """The event of the project that was chosen."""
    name = "machinery" if project.current().root == DOMAIN else "sample"
    found: Shape = importlib.import_module(f"tests.{name}.shape").SHAPE
    return found
