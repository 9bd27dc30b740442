"""`.ci/run` tries a third of the slow tests, and some only if their files have changed: three runs leave out none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from template.tests import bake
from template.tests.paths import ROOT

CI = ROOT / ".ci"
MACHINERY = ROOT / "machinery"


def third(number: int) -> list[str]:
    """The parts of one third."""
    return subprocess.check_output([CI / "third", str(number)], text=True).split()


def test_three_thirds_have_each_slow_test_once() -> None:
    files = {file for file in MACHINERY.glob("tests/*/test_*.py") if file.parent.name != "unit"}
    own = {file for file in files if "mark.cluster" in file.read_text()}  # of `make test-cluster`
    parts = [part for number in range(3) for part in third(number)]
    assert sorted(parts) == sorted(
        ["test", "test-examples", "test-cluster", *(str(file.relative_to(MACHINERY)) for file in files - own)]
    )


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of a repository with a landing two days old and one of now, which has brought the file `new`."""
    origin = tmp_path / "origin"
    (origin / ".ci").mkdir(parents=True)
    (origin / ".ci" / "changed").symlink_to(CI / "changed")
    bake.git(origin, "init", "--quiet")
    for name, seconds in (("old", 1_800_000_000), ("new", 1_800_000_000 + 2 * 24 * 3600)):
        commit(origin, name, GIT_COMMITTER_DATE=f"{seconds} +0000")
    bake.git(tmp_path, "clone", "--quiet", "origin", "clone")
    return tmp_path / "clone"


def commit(folder: Path, name: str, **variables: str) -> None:
    """Commit a new file."""
    (folder / name).write_text(name)
    bake.git(folder, "add", "--all")
    done = bake.run(folder, [*bake.GIT, "commit", "--quiet", "--message", name], **variables)
    assert done.returncode == 0, done.stderr


def changed(folder: Path, *paths: str) -> bool:
    """Whether CI runs the tests that read these files."""
    done = bake.run(folder, [".ci/changed", *paths])
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


def test_the_main_branch_is_compared_with_yesterday(clone: Path) -> None:
    assert changed(clone, "old", "new")
    assert not changed(clone, "old", "nothing")


def test_a_branch_is_compared_with_where_it_began(clone: Path) -> None:
    commit(clone, "newest")
    assert changed(clone, "newest")
    assert not changed(clone, "new")


def test_without_history_everything_has_changed(clone: Path) -> None:
    bake.git(clone.parent, "clone", "--quiet", "--depth", "1", clone.as_uri(), "shallow")
    assert changed(clone.parent / "shallow", "old")
    (folder := clone.parent / "first").mkdir()
    (folder / ".ci").mkdir()
    (folder / ".ci" / "changed").symlink_to(CI / "changed")
    bake.git(folder, "init", "--quiet")
    commit(folder, "only")
    assert changed(folder, "nothing")
