"""A project in a git repository, and `outbox events` run in it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from outbox import cli
from outbox.base import project
from outbox.base.errors import Failure
from outbox.events import catalog
from tests.support.declared import Events

TOML = '[tool.outbox]\ntopic-prefix = "shop"\nsinks-package = "no_sinks"\n'


class Repository:
    """A project in a git repository, and the command run in it."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root, root / "home"
        self.code = ""  # of the failure of the last run
        root.mkdir()
        self.write("pyproject.toml", TOML)
        self.events = Events(root / "connect" / "events")
        self.git("init", "--quiet", "--initial-branch=main")

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def git(self, *arguments: str, given: str | None = None) -> str:
        who = {
            f"GIT_{role}_{part}": "test@example.com" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")
        }
        ours = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        return subprocess.run(
            ["git", *arguments],
            input=given,
            cwd=self.root,
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, **who, **ours},
        ).stdout.strip()

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message=more")
        return self.git("rev-parse", "HEAD")

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """The command in this process: starting one takes longer than most of what it does."""
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("OUTBOX_")]:
                patch.delenv(name)
            for name, value in {project.VARIABLE: str(self.root), "OUTBOX_HOME": str(self.home), **variables}.items():
                patch.setenv(name, value)
            patch.syspath_prepend(str(self.root))
            project.load.cache_clear()
            catalog.load.cache_clear()
            done = CliRunner().invoke(cli.outbox, ["events", *arguments])
        failure = done.exception
        self.code = failure.code if isinstance(failure, Failure) else ""
        if failure is not None and not isinstance(failure, Failure | SystemExit):
            raise failure
        stderr = done.stderr + (f"outbox: {failure}\n" if isinstance(failure, Failure) else "")
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, stderr)

    def findings(self, *arguments: str) -> list[tuple[str, str, str]]:
        done = self.run("check", "--json", *arguments)
        found = [(one["rule"], one["file"], one["property"]) for one in json.loads(done.stdout)]
        assert done.returncode == bool(found), done.stderr
        return found
