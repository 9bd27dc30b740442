"""The guide of docs/adopting.md, followed word for word in a project that copier has just made.

Nothing of the page is repeated here. Each indented block of the guide has one of these forms of paragraph before it:

    `PATH`:                       the block is the whole file
    Run:                          commands, which must succeed
    In a second terminal, run:    a command that runs until the guide has ended
    It prints …:                  lines that the commands before have printed; `…` stands for anything

The one block without such a paragraph generates the project.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import IO, NamedTuple

import pytest
from outbox.base.wait import timeout_scale
from outbox.stack.process import MARK
from outbox.testing.homes import Homes
from outbox.testing.leftovers import leftovers

from template.tests import scratch
from template.tests.bake import Template
from template.tests.paths import ROOT

pytestmark = [pytest.mark.copies, pytest.mark.timeout(1800)]

PAGE = ROOT / "docs" / "adopting.md"
GUIDE, REFERENCE = "## The guide\n", "## Reference\n"
BLOCK = re.compile(r"(?P<paragraph>(?:^\S.*\n)+)\n(?P<block>^ {4}.*\n(?:(?: {4}.*)?\n)*)", re.MULTILINE)
FORMS = {
    "file": re.compile(r"`(?P<path>[\w./-]+)`:"),
    "run": re.compile("Run:"),
    "stay": re.compile("In a second terminal, run:"),
    "print": re.compile("It prints.*:"),
}
GENERATE = "copier copy "
# Not in the checkout, whose .gitignore and settings of tools hold for what is below it.
HOMES = Path(tempfile.gettempdir(), f"outbox-guide-{os.getuid()}")
TIMEOUT_S = 900
VENV = ("bin", "lib", "lib64", "pyvenv.cfg")
# Neither the checkout's settings nor what pytest and make tell those that they start.
NOT_INHERITED = re.compile(r"OUTBOX_(?!TIMEOUT_SCALE)|PYTEST_|MAKE|MFLAGS|GIT_|TEST_HOMES")
GIT = {f"GIT_{who}_{what}": "test@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


class Step(NamedTuple):
    """A block of the guide: its form, its text, and for a file the path."""

    form: str
    text: str
    path: str = ""


def guide() -> str:
    """The guide, without the reference behind it."""
    _, _, rest = PAGE.read_text().partition(GUIDE)
    found, end, _ = rest.partition(REFERENCE)
    assert end
    return found


def steps(text: str) -> Iterator[Step]:
    """The blocks of a text, in their order. Raises ValueError for a block of no known form."""
    for found in BLOCK.finditer(text):
        paragraph, block = found["paragraph"].rstrip("\n"), dedent(found["block"]).strip("\n") + "\n"
        if block.startswith(GENERATE):
            yield Step("generate", block)
            continue
        for form, pattern in FORMS.items():
            if match := pattern.fullmatch(paragraph):
                yield Step(form, block, match.groupdict().get("path", ""))
                break
        else:
            raise ValueError(f"a block without a form, behind {paragraph!r}")


class Shell:
    """A user's terminals in the project's folder."""

    def __init__(self, parent: Path) -> None:
        self.project = parent / "my shop"
        self._running: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []

    @property
    def environment(self) -> Mapping[str, str]:
        """Of a user who has nothing set, with the checkout's packages and the project's modules. JVMs start faster."""
        found = scratch.environment(self.project)
        found = {name: value for name, value in found.items() if not NOT_INHERITED.match(name)}
        return {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1", **found, **GIT, "GIT_CONFIG_GLOBAL": os.devnull}

    def generate(self, command: str) -> None:
        """Generate the project from the checkout as it is, with its uncommitted changes."""
        _, *words, address, name = shlex.split(command)
        assert (address, name) == ("TEMPLATE", "shop")
        template = Template(self.project.with_name("template")).folder
        options = ["--defaults", "--quiet", "--vcs-ref", "HEAD"]
        self._run([sys.executable, "-m", "copier", *words, *options, str(template), str(self.project)], template)
        # The checkout's packages, and the mark that they are installed.
        (self.project / ".venv").mkdir()
        for part in VENV:
            (self.project / ".venv" / part).symlink_to(ROOT / ".venv" / part)
        (self.project / ".venv" / "dev").touch()

    def run(self, commands: str) -> str:
        """Run commands, which must all succeed, and return what they have printed."""
        return self._run(["bash", "-e", "-c", commands], self.project)

    def stay(self, command: str) -> None:
        """Run a command in a second terminal, until ``close``."""
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the command
        process = subprocess.Popen(
            ["bash", "-e", "-c", command],
            cwd=self.project,
            env={**self.environment, MARK: f"{self.project.parent}:terminal"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._running.append((process, log))

    def close(self) -> None:
        """Stop what runs in the terminals, as Ctrl-C does."""
        for process, log in self._running:
            for number in (signal.SIGINT, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    try:
                        process.wait(30 * timeout_scale())
                    except subprocess.TimeoutExpired:
                        continue
            log.seek(0)
            print(log.read().decode()[-3000:])  # noqa: T201 - pytest shows it if the test has failed
            log.close()

    def _run(self, words: list[str], folder: Path) -> str:
        started_at = time.monotonic()
        done = subprocess.run(
            words,
            cwd=folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=TIMEOUT_S * timeout_scale(),
        )
        print(f"{time.monotonic() - started_at:5.1f} s  {words[-1].splitlines()[0]}")  # noqa: T201
        assert done.returncode == 0, f"{words[-1]}\n{done.stdout[-10_000:]}"
        return done.stdout


@pytest.fixture
def shell() -> Iterator[Shell]:
    """A shell in a folder whose name has a space; nothing that it has started outlives the test, or a killed pytest."""
    homes = Homes(HOMES)
    made = Shell(homes.new("guide"))
    try:
        yield made
    finally:
        try:
            made.close()
        finally:
            homes.close(keep_logs=False)
    assert leftovers(made.project) == []


def test_a_reader_gets_from_the_sample_to_a_domain_of_orders(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    printed = ""
    for step in steps(guide()):
        match step.form:
            case "generate":
                shell.generate(step.text)
            case "file":
                (shell.project / step.path).write_text(step.text)
            case "run":
                printed = shell.run(step.text)
            case "stay":
                shell.stay(step.text)
            case "print":
                assert re.search(pattern(step.text), printed, re.MULTILINE), f"{step.text}\nis not in\n{printed}"
    changed = shell.run("git diff --shortstat HEAD~1 HEAD").strip()
    assert shell.run("git status --porcelain") == ""
    with capsys.disabled():
        print(f"\nfollowing the guide: {changed}")  # noqa: T201


def pattern(shown: str) -> str:
    """Lines that the page shows as having been printed, as a regular expression."""
    lines = (".*".join(re.escape(part) for part in line.split("…")) for line in shown.splitlines())
    return "^" + "\n".join(lines) + "$"


@pytest.mark.parametrize("text", ["run:\n\n    ls\n", "This is\nRun:\n\n    ls\n", "`a file`:\n\n    x\n"])
def test_a_block_of_no_known_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="without a form"):
        list(steps(text))


def test_the_forms_are_recognised() -> None:
    text = "Why.\n\n`a/b.py`:\n\n    x = 1\n\n\n    if x:\n        y = 2\n\nRun:\n\n    ls\n\nIt prints:\n\n    b.py\n"
    assert list(steps(text)) == [
        Step("file", "x = 1\n\n\nif x:\n    y = 2\n", "a/b.py"),
        Step("run", "ls\n"),
        Step("print", "b.py\n"),
    ]
    assert re.search(pattern("a…c\n42"), "x\nabbc\n42\n", re.MULTILINE)
    assert not re.search(pattern("a…c\n42"), "xabbc\n42\n", re.MULTILINE)
