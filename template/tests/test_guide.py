"""The pages with excerpts of the examples: each excerpt is in its file, each command exists, and the guide is short.

The domain of examples/shop, in a project that copier has just made, passes the project's own check.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from outbox.cli import outbox
from outbox_lab.testing.homes import Homes, leftovers

from template.tests import bake, pages, scratch
from template.tests.bake import Template
from template.tests.paths import ROOT

LINE_MAX = 120


class Page(NamedTuple):
    """A page, the example that it shows, and how long it may be."""

    file: Path
    example: Path
    lines_max: int
    frame: Path = ROOT  # the project that has the files of copier

    @property
    def text(self) -> str:
        return self.file.read_text()


GUIDE = Page(ROOT / "docs" / "adopting.md", ROOT / "examples" / "shop", 300, ROOT / "template" / "minimal")
EXISTING = Page(ROOT / "machinery" / "docs" / "existing-service.md", ROOT / "examples" / "existing", 120)
SOAK = Page(ROOT / "machinery" / "docs" / "soak.md", ROOT, 300)
PAGES = pytest.mark.parametrize("page", [GUIDE, EXISTING, SOAK], ids=lambda page: page.file.stem)
# Of a user of the project: neither the checkout's settings nor what pytest and make tell those that they start.
NOT_INHERITED = re.compile(r"OUTBOX_(?!TIMEOUT_SCALE)|PYTEST_|MAKE|MFLAGS|GIT_|TEST_HOMES")
# Not in the checkout, whose .gitignore and settings of tools hold for what is below it.
HOMES = Path(tempfile.gettempdir(), f"outbox-guide-{os.getuid()}")
DOMAIN = ("service", "sinks", "migrations", "connect/events", "tests", "demo/workload.py")
VENV = ("bin", "lib", "lib64", "pyvenv.cfg")
TIMEOUT_S = 1800


@PAGES
def test_a_page_is_short(page: Page) -> None:
    assert len(page.text.splitlines()) <= page.lines_max
    assert [line for line in page.text.splitlines() if len(line) > LINE_MAX] == []


@PAGES
def test_each_excerpt_is_in_its_file(page: Page) -> None:
    found = list(pages.excerpts(page.text))
    assert len(found) > 4
    assert [one for one in found if not one.is_in(page.example / one.path)] == []


@PAGES
def test_each_file_that_is_named_exists(page: Page) -> None:
    """In the example, or in the frame that copier makes: for the guide, that of a minimal project."""
    named = {text for text in pages.QUOTED.findall(page.text) if re.fullmatch(r"[\w-]+(/[\w.-]+)+/?", text)}
    places = (page.example, page.frame, ROOT / "machinery")
    elsewhere = {".outbox/stack.env", "examples/shop"}  # made later; the example itself
    assert named
    assert [one for one in sorted(named - elsewhere) if not any((place / one).exists() for place in places)] == []


@PAGES
def test_each_command_exists(page: Page) -> None:
    words = [shlex.split(text, comments=True) for text in pages.commands(page.text) if is_command(text)]
    assert any(one[0] == "outbox" for one in words)
    assert [one for one in words if not exists(one)] == []


def is_command(text: str) -> bool:
    """Whether a reader would type it: a command of ours with its words."""
    return bool(re.match(r"(outbox|make) [a-z]", text))


def exists(words: list[str]) -> bool:
    """Whether make has the target, or `outbox` the command and its options."""
    if words[0] == "make":
        return bool(re.search(rf"(?m)^{words[1]}:", (ROOT / "Makefile").read_text()))
    command: click.Command | None = outbox
    for word in words[1:]:
        if not isinstance(command, click.Group):
            break
        command = command.get_command(click.Context(command), word)
    if command is None:
        return False
    options = {option for parameter in command.params for option in parameter.opts}
    return {word for word in words if word.startswith("--")} <= options


@pytest.mark.copies
@pytest.mark.timeout(TIMEOUT_S)
def test_project_with_the_example_domain_passes_its_check(home: Path) -> None:
    """`make test-examples` runs the same tests on the same files, and `make bake-minimal` those of a made project."""
    project = generated(home)
    run(project, pages.block(GUIDE.text, "rm -r"))
    add_sinks(project, GUIDE.example)
    for name in DOMAIN:
        copy(GUIDE.example / name, project / name)
    ours, theirs = (tomllib.loads((folder / "pyproject.toml").read_text()) for folder in (project, GUIDE.example))
    assert ours["tool"]["outbox"] == theirs["tool"]["outbox"]
    assert ours["project"]["name"] == theirs["project"]["name"]
    bake.commit(project)
    # As the project's CI compares the guide's change with what was there before: the sample.
    workflow = (project / ".github" / "workflows" / "ci.yml").read_text()
    [compare] = re.findall(r"^ +(\S+ events check --against) ", workflow, re.MULTILINE)
    run(project, f"{compare} HEAD~1")
    run(project, pages.block(GUIDE.text, "! git grep"))
    # The virtual environment is the checkout's.
    run(project, "make -o .venv/dev check")
    run(project, "make -o .venv/dev -o archives test ARGS='-n 0 --collect-only -q'")
    assert bake.git(project, "status", "--porcelain") == ""


def add_sinks(project: Path, example: Path) -> None:
    """Name the example's sinks in pyproject.toml, as `outbox new sink` does for each."""
    [sinks] = re.findall(r"(?m)^sinks = \[.*?\]", (example / "pyproject.toml").read_text())
    file = project / "pyproject.toml"
    assert "sinks = []" in file.read_text()
    file.write_text(file.read_text().replace("sinks = []", sinks))


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a space in its name. Nothing that was started in it outlives the test, or a killed pytest."""
    homes = Homes(HOMES)
    made = homes.new("guide")
    yield made
    homes.close(keep_logs=False)
    assert leftovers(made) == []


def generated(folder: Path, sample: str = "minimal") -> Path:
    """The project, made by the page's command from the checkout as it is, with its uncommitted changes."""
    command = pages.block(GUIDE.text, "copier copy").replace("sample=minimal", f"sample={sample}")
    _, *words, address, name = shlex.split(command)
    assert (address, name) == ("TEMPLATE", "shop")
    project = folder / "my shop"
    done = bake.copier(folder, *words, str(Template(folder / "template").folder), str(project))
    assert done.returncode == 0, done.stderr
    (project / ".venv").mkdir()
    for part in VENV:
        (project / ".venv" / part).symlink_to(ROOT / ".venv" / part)
    (project / ".venv" / "dev").touch()
    bake.git(project, "init", "--quiet")
    bake.commit(project)
    return project


def copy(source: Path, target: Path) -> None:
    """Replace what is there by the example's, without what its tests have left."""
    if source.is_file():
        shutil.copy(source, target)
        return
    shutil.rmtree(target)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


def run(project: Path, commands: str) -> None:
    """Run commands as a user who has nothing set, with the checkout's packages. JVMs start faster."""
    found = {name: value for name, value in scratch.environment(project).items() if not NOT_INHERITED.match(name)}
    found |= {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1", "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache" / "guide")}
    done = subprocess.run(
        ["bash", "-e", "-c", commands],
        cwd=project,
        env=found,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout[-10_000:]}"
