"""Events declared by a test: folders of a catalog, and the project that has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outbox.base import project
from outbox.events.catalog import Catalog, load
from outbox.events.schema import PayloadSchema
from tests.support.suite import DOMAIN

TOML = 'key = "id"\nversion = "number"\n'
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
    """A folder of events."""

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
    """The schema of a document."""
    return PayloadSchema("test", document)
