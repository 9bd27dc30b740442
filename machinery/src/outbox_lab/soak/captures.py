"""The captured tables of a run: those whose changes one of its sinks reads, each by a connector of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from outbox.base.database import Row, query
from outbox.base.errors import Failure
from outbox.base.settings import Role, Settings, SinkRole, SourceRole
from outbox.kafka import records, topics
from outbox.kafka.records import Within
from outbox.relay import connectors
from outbox.relay.connectors import Connector
from outbox.sink.decoding.decoder import RecordDecoder
from outbox.sink.decoding.records import Records
from outbox.sink.spec import SinkSpec
from outbox_lab.soak.domain import Domain, TableCopy, copies_of
from outbox_lab.soak.seen import Copy, RowChange

ROWS = "SELECT to_jsonb(found.*)::text FROM ({}) AS found"


def read_by(settings: Settings, specs: Iterable[SinkSpec]) -> list[Connector]:
    """The connectors of the captured tables that these sinks read."""
    read = {topic for one in specs for topic in one.decoders}
    return [one for one in connectors.others(settings) if one.topic in read]


def require_copies(settings: Settings, domain: Domain, specs: Iterable[SinkSpec]) -> None:
    """Raises Failure if the domain does not say how to compare what these sinks have of captured tables."""
    specs = list(specs)
    captured = {one.topic for one in read_by(settings, specs)}
    reading = {one.name for one in specs if not captured.isdisjoint(one.decoders)}
    if missing := sorted(reading - copies_of(domain).keys()):
        raise Failure(
            f"the soak does not know which rows of a captured table {', '.join(missing)} must have",
            "write `copies` of the soak's domain, as docs/soak.md shows, or leave the sink out of the soak",
            code="soak-domain-wrong",
        )


class Captured:
    """What a run has left of the captured tables, and of their changes on the topics."""

    def __init__(self, settings: Settings, specs: Sequence[SinkSpec], dropped: Sequence[RowChange]) -> None:
        """``dropped``: what a fault has let topics drop."""
        self._settings, self._specs = settings, specs
        self._topics = [one.topic for one in read_by(settings, specs)]
        self._dropped = {one.place for one in dropped}
        by_place = {one.place: one for one in dropped}
        for topic in self._topics:
            decoder = self._readers(topic)[0].decoders[topic]
            by_place |= {one.place: one for one in row_changes_of(settings, topic, decoder)}
        self.changes = sorted(by_place.values(), key=lambda one: (one.topic, one.partition, one.offset))

    def left(self, spec: SinkSpec) -> list[RowChange]:
        """The changes that a sink reads, and that its topic has not dropped."""
        return [one for one in self.changes if one.topic in spec.decoders and one.place not in self._dropped]

    def copies(self, domain: Domain) -> list[Copy]:
        """What the source and the sinks have of the tables. Raises Failure if a query of the domain cannot be used."""
        given = copies_of(domain)
        return [self._copy(one, topic, given[one.name]) for topic in self._topics for one in self._readers(topic)]

    def _readers(self, topic: str) -> list[SinkSpec]:
        return [one for one in self._specs if topic in one.decoders]

    def _copy(self, spec: SinkSpec, topic: str, given: TableCopy) -> Copy:
        source, rows = self._rows(SourceRole.OWNER, given.source), self._rows(SinkRole.OWNER, given.sink)
        columns = {given.key} | ({given.version} if given.version else set())
        if lacking := {name for row in (*source, *rows) for name in columns - row.keys()}:
            raise Failure(
                f"the queries of {spec.name} return no column {', '.join(sorted(lacking))}",
                "correct `copies` of the soak's domain",
                code="soak-domain-wrong",
            )
        return Copy(spec.name, topic, given.key, given.version, source, rows)

    def _rows(self, role: Role, sql: str) -> list[Row]:
        return [_json(row) for (row,) in query(self._settings, role, ROWS.format(sql.strip().rstrip(";")))]


def row_changes_of(
    settings: Settings, topic: str, decoder: RecordDecoder, within: Within | None = None
) -> Iterator[RowChange]:
    """The changes on the topic of a captured table that a sink takes, or those within these offsets.

    Their content is what Debezium has written, and not what the sink's decoder makes of it.
    """
    for messages in records.batches(settings, topic, within or topics.watermarks(settings, topic)):
        taken = {
            place
            for rows in decoder.decode(Records.of_messages(messages)).rows.values()
            for place in zip(rows["partition"].to_pylist(), rows["offset"].to_pylist(), strict=True)
        }
        for message in messages:
            partition, offset = message.partition() or 0, message.offset() or 0
            if (partition, offset) in taken:
                key, value = _json(message.key()), _json(message.value())
                yield RowChange(
                    topic=topic,
                    partition=partition,
                    offset=offset,
                    table=value["source"]["table"],
                    key=str(next(iter(key.values()))) if len(key) == 1 else json.dumps(key),
                    lsn=value["source"]["lsn"],
                    op=value["op"],
                    row=value["after"] or {},
                )


def _json(text: str | bytes | None) -> Any:
    """A JSON value. Fractions stay as they are written, so that nothing is rounded."""
    return json.loads(text or b"null", parse_float=str)
