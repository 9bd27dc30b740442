"""A sink that writes down each event that it applies, as its projection sees it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outbox.base.database import query
from outbox.base.settings import Settings, SinkRole
from outbox.events.catalog import Catalog
from outbox.sink.decoding.records import Record
from outbox.sink.remembering import asked
from outbox.sink.repair.replay import Replayed, Selection
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Counts, SinkWriter
from tests.support.declared_sinks import batch_of, sink
from tests.support.kept_rows import cursor_of
from tests.support.sink_driver import driving, projections_in, replayed

NAME = "orders"
TABLES = """
CREATE TABLE seen (line bigserial, sink text, topic text, event jsonb);
CREATE TABLE unwelcome (event_id uuid);
GRANT SELECT, INSERT, DELETE ON seen, unwelcome TO {writer};
GRANT USAGE ON SEQUENCE seen_line_seq TO {writer};
"""
PROJECTION = """
-- [refuse]
INSERT INTO rejections
SELECT event_id, 'unwelcome', 'as yet' FROM new_events WHERE event_id IN (SELECT event_id FROM unwelcome);
-- [apply]
INSERT INTO seen (sink, topic, event)
SELECT %(sink)s, %(topic)s, to_jsonb(new_events) FROM new_events ORDER BY partition, "offset";
"""
ORDERED = f"-- ordered\n{PROJECTION}"


@dataclass
class Seen:
    """The sink, as it is deployed at the moment: with the events that are declared, and those that it asks for."""

    settings: Settings
    folder: Path
    known: Catalog
    names: Sequence[str]
    by: str = "dedup"
    projection: str = PROJECTION
    next_offsets: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._projections = projections_in(self.folder, self.projection, "seen")

    @property
    def spec(self) -> SinkSpec:
        """The sink as it is declared now."""
        return sink(self.known, *self.names, projections=self._projections, name=NAME, by=self.by)

    def deploy(self, *names: str, known: Catalog | None = None, is_decided: bool = True) -> None:
        """Let the sink ask for these events, as they are declared now. A person has decided that it goes on from where
        it is, unless said otherwise.
        """
        self.names, self.known = names or self.names, known or self.known
        if is_decided:
            with cursor_of(self.settings) as cursor:
                asked.decide(cursor, self.spec.asked)

    def running(self) -> AbstractContextManager[SinkWriter]:
        """The sink's writer."""
        return driving(self.settings, self.spec)

    def apply(self, topic: str, *records: Record) -> Counts:
        """Start the sink, and apply records as the next batch of a topic."""
        start = self.next_offsets.get(topic, 0)
        self.next_offsets[topic] = start + len(records)
        return self.apply_again(topic, *records, start=start)

    def apply_again(self, topic: str, *records: Record, start: int = 0) -> Counts:
        """Apply records as a batch that begins at an offset."""
        with self.running() as writer:
            return writer.apply(batch_of(self.spec, topic, *records, start=start))

    def replay(self, **filters: Any) -> Replayed:
        """Replay open letters, as the command does."""
        return replayed(self.settings, self.spec, Selection(**filters))

    def refuse(self, *events: Record) -> None:
        """The events that the projection refuses from now on."""
        self.query("DELETE FROM unwelcome")
        self.query("INSERT INTO unwelcome SELECT unnest(%s::uuid[])", [*map(id_of, events)])

    def events(self, *columns: str) -> list[tuple[object, ...]]:
        """Columns of what was applied, in its order."""
        rows = self.query("SELECT event::text, topic FROM seen ORDER BY line")
        found = [json.loads(str(event)) | {"topic": topic} for event, topic in rows]
        return [tuple(one.get(column) for column in columns) for one in found]

    def letters(self, *columns: str) -> list[tuple[object, ...]]:
        """Columns of the dead letters, in the order of the topics."""
        return self.query(f'SELECT {", ".join(columns)} FROM dead_letters ORDER BY topic, partition, "offset"')

    def query(self, sql: str, *parameters: object) -> list[tuple[object, ...]]:
        """The rows of a statement, which is committed."""
        return query(self.settings, SinkRole.OWNER, sql, parameters or None)


def id_of(event: Record) -> str:
    """The id of an event."""
    return (dict(event.headers)["id"] or b"").decode()


def create_tables(settings: Settings) -> None:
    """The tables of the sink's projection."""
    query(settings, SinkRole.OWNER, TABLES.replace("{writer}", settings.role_name(SinkRole.WRITER)))
