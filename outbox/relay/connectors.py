"""The connectors, each a file of connect/: `outbox` relays the events; any other captures a table as it is.

What a connector owns is named after it: its slot, its offsets topic, and, beside the outbox's, its publication. The
file says so, and everybody else asks here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from outbox.base import project
from outbox.base.settings import Settings, SourceRole

OUTBOX = "outbox"
REFERENCE = re.compile(r"\$\{settings:(\w+)\}")

Config = dict[str, str]


@dataclass(frozen=True)
class Connector:
    """One connector, with its configuration as Connect is given it. The slot has the connector's name."""

    kind: str  # the name of its file
    name: str
    topic: str
    config: Config

    @property
    def is_outbox(self) -> bool:
        """Whether it relays the outbox, a table that keeps every event, so that what is missing can be sent again."""
        return self.kind == OUTBOX

    @property
    def publication(self) -> str:
        """The publication that it reads: made by a migration for the outbox, by `connect apply` for others."""
        return self.config["publication.name"]

    @property
    def table(self) -> tuple[str, str]:
        """Schema and name of the table that it captures."""
        schema, _, name = self.config["table.include.list"].partition(".")
        return schema, name

    @property
    def offsets_topic(self) -> str:
        """The topic of its own in which Connect keeps its offsets, in every mode.

        Not the worker's: of that one a worker without exactly-once reads aborted offsets too, and would go on behind
        events that were never committed.
        """
        return self.config["offsets.storage.topic"]

    def command(self, verb: str) -> str:
        """The command that does this to it: `outbox connect apply`, `outbox connect apply changes`."""
        return f"outbox connect {verb}" + ("" if self.is_outbox else f" {self.kind}")

    @property
    def start_again(self) -> str:
        """The remedy where changes are, or may be, missing on the topic."""
        brings = "the whole outbox table again; idempotent sinks skip it"
        if not self.is_outbox:
            brings = f"a snapshot brings the state of every row of {self.table[1]}, not what came in between"
        return f"`{self.command('remove')} --forget`, then `{self.command('apply')}`: {brings}"


def folder() -> Path:
    """The folder of the connectors' files."""
    return project.current().connect


def kinds() -> list[str]:
    """The names of the files, that of the outbox first."""
    return sorted((file.stem for file in folder().glob("*.json")), key=lambda kind: (kind != OUTBOX, kind))


def load(settings: Settings, kind: str = OUTBOX) -> Connector:
    """The connector of a file, each ``${settings:NAME}`` in it replaced.

    A line is left out if its setting has no value. Other references, as ``${env:NAME}`` of the password, stay: a config
    provider of the worker resolves them, so no secret stands in Connect's REST interface or its config topic.
    """
    values = {
        **{name: getattr(settings, name) for name in type(settings).model_fields},
        "connect_source_db_host": settings.connect_source_db_host or settings.source_db_host,
        "connect_source_db_sslrootcert": settings.connect_source_db_sslrootcert or settings.source_db_sslrootcert,
        "source_db_cdc_role": settings.role_name(SourceRole.CDC),
        "exactly_once_support": "required" if settings.exactly_once else "requested",
    }

    def is_set(text: str) -> bool:
        return all(values[name] is not None for name in REFERENCE.findall(text))

    def replace(text: str) -> str:
        return REFERENCE.sub(lambda match: str(values[match[1]]), text)

    written = json.loads((folder() / f"{kind}.json").read_text())
    config = {key: replace(value) for key, value in written.items() if is_set(value)}
    # Debezium names the topic of a table so; the EventRouter puts another name in its place.
    captured = f"{config['topic.prefix']}.{config['table.include.list']}"
    topic = settings.topic if kind == OUTBOX else captured
    return Connector(kind=kind, name=config["slot.name"], topic=topic, config=config)


def others(settings: Settings) -> list[Connector]:
    """Those beside the outbox's; whether one is in use is another question."""
    return [load(settings, kind) for kind in kinds() if kind != OUTBOX]
