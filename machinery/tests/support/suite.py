"""The tests run on the fixture domain, a project of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from outbox.base import project
from outbox_lab.testing import homes
from tests.support.paths import ROOT

DOMAIN = ROOT / "tests" / "domain"


def choose(root: Path) -> None:
    """Let this process, and those that it starts, work for a project. The conftest does so before all else."""
    os.environ[project.VARIABLE] = str(root)
    os.environ.setdefault(homes.VARIABLE, str(ROOT.parent / ".outbox" / "tests"))
    project.make_importable()


def copied_to(folder: Path) -> Path:
    """A copy of the fixture domain, to edit; the folder."""
    return Path(shutil.copytree(DOMAIN, folder))
