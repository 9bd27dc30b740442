"""Events declared by a test: folders of a catalog, the project that has them, and `outbox events` run in it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from outbox import cli
from outbox.base import project
from outbox.base.errors import Failure
from outbox.events.catalog import Catalog, load
from outbox.events.schema import PayloadSchema
from tests.support.suite import DOMAIN

TOML = 'key = "id"\nversion = "number"\n'
PROJECT = '[tool.outbox]\ntopic-prefix = "shop"\nsinks-package = "no_sinks"\n'
NUMBER = {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}
EXAMPLE = {"id": "a", "number": 1}
VERSIONED = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "version": {"type": "integer", "minimum": 1, "maximum": 2**53}},
    "required": ["id", "version"],
}
OF_DOMAIN = ("source-database", "sink-database", "topic-prefix", "service", "sinks-package")


def payload(properties: dict[str, Any] | None = None, required: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """A schema with a key, a version and these properties."""
    return {
        "type": "object",
        "required": ["id", "number", *required],
        "properties": {"id": {"type": "string"}, "number": NUMBER, **(properties or {})},
        **more,
    }


class Events:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def aggregate(self, name: str, toml: str = TOML, **schemas: Any) -> Events:
        """Write an aggregate type; its events as ``placed_v1={…}``."""
        entry = self.folder / name
        entry.mkdir(parents=True, exist_ok=True)
        (entry / "aggregate.toml").write_text(toml)
        for declared, schema in schemas.items():
            type_, _, version = declared.rpartition("_")
            self.write(f"{name}/{type_}.{version}.schema.json", schema)
        return self

    def write(self, name: str, content: Any) -> Events:
        """Write a file: a text, or anything else as JSON."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        return self

    def load(self) -> Catalog:
        """The catalog, as the files are now."""
        load.cache_clear()
        return load(self.folder, "shop")


def declare(folder: Path, aggregate: str, *types: str, **options: object) -> None:
    """Declare an aggregate type with these events, each a key and a version. ``options`` are those of its file."""
    every = {"key": "id", "version": "version", **options}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in every.items()]
    schemas = {f"{type_}_v1": VERSIONED for type_ in types or ("changed",)}
    Events(folder).aggregate(aggregate, "".join(lines), **schemas)


def work_for(folder: Path, monkeypatch: pytest.MonkeyPatch, connect: Path | None = None) -> Path:
    """Let this process work for a project in a folder, with names and connectors of the fixture domain. Return its
    folder of events.
    """
    domain = project.load(DOMAIN)
    folder.mkdir(exist_ok=True)
    lines = [f"{name} = {json.dumps(getattr(domain, name.replace('-', '_')))}" for name in OF_DOMAIN]
    lines += [f"connect = {json.dumps(str(connect or domain.connect))}", 'events = "events"']
    (folder / "pyproject.toml").write_text("\n".join(["[tool.outbox]", *lines]) + "\n")
    monkeypatch.setenv(project.VARIABLE, str(folder))
    return folder / "events"


def schema_of(document: dict[str, Any]) -> PayloadSchema:
    return PayloadSchema("test", document)


class Repository:
    """A project in a git repository, and the command run in it."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root, root / "home"
        self.code = ""  # of the failure of the last run
        root.mkdir()
        self.write("pyproject.toml", PROJECT)
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
            load.cache_clear()
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
