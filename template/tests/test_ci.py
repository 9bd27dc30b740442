"""`.ci/run` tries a seventh of the slow tests, and some only if their files have changed: seven runs leave out none."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import tomllib
from datetime import date
from itertools import chain
from pathlib import Path

import pytest
from outbox.jvm import jars

from template.tests import bake
from template.tests.paths import ROOT

CI = ROOT / ".ci"
MACHINERY = ROOT / "machinery"
SUITES = ("test", "test-examples", "test-cluster", "test-soak")
WORKFLOWS = (ROOT / ".github" / "workflows" / "ci.yml", ROOT / "template" / "ci.yml")


def test_an_action_is_a_commit_and_the_same_in_a_generated_project() -> None:
    used = [re.findall(r"uses: (.*)", file.read_text()) for file in WORKFLOWS]
    for action in chain(*used):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", action), action
    assert {*used[1]} <= {*used[0]}


def test_a_decision_of_the_audit_has_a_reason_and_an_end() -> None:
    decided = tomllib.loads((ROOT / "osv-scanner.toml").read_text())
    assert {*decided} == {"IgnoredVulns", "PackageOverrides"}
    for decision in chain(*decided.values()):
        assert len(decision["reason"]) > 20
        end = decision.get("ignoreUntil") or decision["effectiveUntil"]
        assert isinstance(end, date)


def test_jars_that_do_not_say_who_they_are_are_those_of_pyspark() -> None:
    named = re.findall(r"^[\w.-]+:([\w.-]+):([\w.-]+)=", (ROOT / "pyspark-jars.lockfile").read_text(), re.MULTILINE)
    assert len(named) > 10
    assert {f"{name}-{version}.jar" for name, version in named} <= {jar.name for jar in jars.spark_jars()}


def parts(ci: Path = CI) -> list[list[str]]:
    """The suites and files of each part."""
    found: list[list[str]] = runpy.run_path(str(ci / "part"))["parts"]()
    assert len(found) == 7
    assert all(found)
    return [sorted(part) for part in found]


@pytest.mark.parametrize("number", ["1", "7001"])
def test_the_number_of_commits_chooses_a_part(number: str) -> None:
    assert bake.run(ROOT, [".ci/part", number]).stdout == f"{' '.join(parts()[1])}\n"


def slow_tests(machinery: Path) -> list[str]:
    """Each file of tests but the unit tests, found without a pattern of folders."""
    tests = machinery / "tests"
    found = [Path(folder, file) for folder, _, files in os.walk(tests) for file in files]
    return [
        str(file.relative_to(machinery))
        for file in found
        if file.name.startswith("test_") and file.suffix == ".py" and tests / "unit" not in file.parents
    ]


def test_the_parts_have_each_slow_test_once() -> None:
    assert len(slow_tests(MACHINERY)) > 50
    assert sorted(chain(*parts())) == sorted([*SUITES, *slow_tests(MACHINERY)])


def test_new_files_are_dealt_too_and_move_no_other(tmp_path: Path) -> None:
    ci, machinery = tmp_path / ".ci", tmp_path / "machinery"
    shutil.copytree(CI, ci)
    before = slow_tests(MACHINERY)
    for name in [*before, "tests/unit/test_new.py"]:
        new_file(machinery / name)
    assert parts(ci) == parts()
    new = [f"tests/{folder}/test_new_{number}.py" for folder in ("faults", "new/deep") for number in range(5)]
    for name in new:
        new_file(machinery / name)
    more = parts(ci)
    assert sorted(chain(*more)) == sorted([*SUITES, *before, *new])
    assert [[name for name in part if name not in new] for part in more] == parts()


def new_file(file: Path) -> None:
    """A file of tests, of which all need a cluster."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("import pytest\n\npytestmark = pytest.mark.cluster\n")


def test_every_path_that_is_compared_is_there() -> None:
    script = (CI / "run").read_text().replace("\\\n", "")
    compared = re.findall(r"^if \.ci/changed (.*); then$", script, re.MULTILINE)
    assert len(compared) == 3
    done = bake.run(ROOT, ["bash", "-c", f"ls -d {' '.join(compared)}"])
    assert done.returncode == 0, done.stderr


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
