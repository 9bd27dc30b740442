"""Declared events, written for a test: a folder of events as a project has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outbox.events.catalog import Catalog, load
from outbox.events.schema import PayloadSchema

TOML = 'key = "id"\nversion = "number"\n'
NUMBER = {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}
EXAMPLE = {"id": "a", "number": 1}


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


def schema_of(document: dict[str, Any]) -> PayloadSchema:
    """The schema of a document."""
    return PayloadSchema("test", document)
