"""Events declared by a test: folders of a catalog, and the project that has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outbox.base import project
from tests.support.suite import DOMAIN

NAMES = ("source-database", "sink-database", "topic-prefix", "service", "sinks-package")


def declare(folder: Path, aggregate: str, *types: str, **options: object) -> None:
    """Declare an aggregate type with these events, each a key and a version. ``options`` are those of its file."""
    home = folder / aggregate
    home.mkdir(parents=True, exist_ok=True)
    lines = [f"{name} = {json.dumps(value)}" for name, value in {"key": "id", "version": "version", **options}.items()]
    (home / "aggregate.toml").write_text("\n".join(lines) + "\n")
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"id": {"type": "string"}, "version": {"type": "integer", "minimum": 1, "maximum": 2**53}},
        "required": ["id", "version"],
    }
    for type_ in types or ("changed",):
        (home / f"{type_}.v1.schema.json").write_text(json.dumps(schema))


def work_for(folder: Path, monkeypatch: pytest.MonkeyPatch, connect: Path | None = None) -> Path:
    """Let this process work for a project in a folder, with names and connectors of the fixture domain. Return its
    folder of events.
    """
    domain = project.load(DOMAIN)
    folder.mkdir(exist_ok=True)
    lines = [f"{name} = {json.dumps(getattr(domain, name.replace('-', '_')))}" for name in NAMES]
    lines += [f"connect = {json.dumps(str(connect or domain.connect))}", 'events = "events"']
    (folder / "pyproject.toml").write_text("\n".join(["[tool.outbox]", *lines]) + "\n")
    monkeypatch.setenv(project.VARIABLE, str(folder))
    return folder / "events"
