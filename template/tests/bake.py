"""Projects made by copier from this checkout as it is now, as a user makes them.

    python -m template.tests.bake SAMPLE

makes one with the default answers, which installs itself and runs its own `make test`. `fastapi` is the minimal one
with the other framework.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from template.tests import scratch

# HEAD: without it, copier would take the newest tag that looks like a version.
OPTIONS = ["--defaults", "--quiet", "--vcs-ref", "HEAD"]
# Runs copier for each list of words.
EACH = """
import json, sys
from run_copier import run

print(json.dumps([run(words) for words in json.loads(sys.argv[1])]))
"""
GIT = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]


class Template:
    """A repository with the checkout's files, or those of some places, which copier copies from and a test changes."""

    def __init__(self, folder: Path, *places: str) -> None:
        self.folder = scratch.copy(folder, *places)
        git(folder, "init", "--quiet")
        commit(folder)

    def generate(self, project: Path, **answers: object) -> subprocess.CompletedProcess[str]:
        """Make a project; what is not answered has its default."""
        return copier(project.parent, "copy", *_data(answers), str(self.folder), str(project))

    def attempts(self, project: Path, several: Sequence[Mapping[str, object]]) -> list[tuple[int, str]]:
        """Try to make a project, with each of several answers, in one process: exit statuses and errors."""
        words = [["copy", *OPTIONS, *_data(answers), str(self.folder), str(project)] for answers in several]
        return [
            (status, errors) for status, errors in json.loads(python(project.parent, "-c", EACH, json.dumps(words)))
        ]

    def made(self, project: Path, **answers: object) -> Path:
        """A project that must be made; its folder."""
        done = self.generate(project, **answers)
        assert done.returncode == 0, done.stderr
        return project

    def update(self, project: Path, **answers: object) -> subprocess.CompletedProcess[str]:
        """Merge the template's present state into a project."""
        return copier(project, "update", *_data(answers))


def copier(folder: Path, command: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run copier without questions, and without the trust that tasks would need."""
    return run(folder, [sys.executable, "-m", "run_copier", command, *OPTIONS, *words], **variables)


def git(folder: Path, *words: str) -> str:
    """Output of a command of git. Raises AssertionError if it fails."""
    return _succeed(folder, [*GIT, *words])


def python(folder: Path, *words: str, interpreter: Path = Path(sys.executable), **variables: str) -> str:
    """Output of Python in a folder, with our packages unless told. Raises AssertionError if it fails."""
    return _succeed(folder, [str(interpreter), *words], **variables)


def commit(folder: Path, message: str = "test") -> None:
    """Commit everything in a folder."""
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message)


def run(folder: Path, words: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, without the checkout's packages; its output is captured."""
    environment = {**scratch.environment(folder), **variables}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def _succeed(folder: Path, words: Sequence[str], **variables: str) -> str:
    done = run(folder, words, **variables)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    return done.stdout


def _data(answers: Mapping[str, object]) -> list[str]:
    return [word for name, answer in answers.items() for word in ("--data", f"{name}={answer}")]


def main(sample: str) -> int:
    """Make a project in a path with a space. It installs itself, and runs its own `make test`.

    Its own `make check` is that of the guide's project (test_guide), on files that test_bake checks. Returns the exit
    status.
    """
    with tempfile.TemporaryDirectory(prefix="outbox bake ") as temporary:
        template = Template(Path(temporary, "template"))
        answers = {"sample": "minimal", "web": "fastapi"} if sample == "fastapi" else {"sample": sample}
        project = template.made(Path(temporary, "stock-room"), project_name="stock-room", **answers)
        git(project, "init", "--quiet")
        commit(project)
        # To record class archives for its few starts would take longer than they gain; so would a second stack.
        for words in (["install"], ["-o", "archives", "test", "ARGS=-n 0"]):
            status = subprocess.run(["make", *words], cwd=project, env=scratch.without_make(), check=False).returncode
            if status:
                break
        return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
