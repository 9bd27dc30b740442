"""The public API for sinks: what a module ``job`` declares (docs/projections.md), and decoders of other records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.base.heavy import exports

if TYPE_CHECKING:
    from outbox.events.schema import Column, Rejection
    from outbox.events.schema import load as load_schema
    from outbox.events.values import parse_json
    from outbox.relay.connectors import load as load_connector
    from outbox.sink.applying.lakehouse.target import IcebergTarget, LakehouseTarget
    from outbox.sink.applying.postgres.target import PostgresTarget
    from outbox.sink.applying.topics import TopicTarget
    from outbox.sink.decoding.decoder import UUID, DecodedEvent, RecordDecoder, Skipped
    from outbox.sink.decoding.records import Record
    from outbox.sink.spec import SinkJob
else:  # when they are used: most jobs need one of them
    __getattr__ = exports(
        __name__,
        {
            "UUID": "outbox.sink.decoding.decoder:UUID",
            "Column": "outbox.events.schema:Column",
            "DecodedEvent": "outbox.sink.decoding.decoder:DecodedEvent",
            "IcebergTarget": "outbox.sink.applying.lakehouse.target:IcebergTarget",
            "LakehouseTarget": "outbox.sink.applying.lakehouse.target:LakehouseTarget",
            "PostgresTarget": "outbox.sink.applying.postgres.target:PostgresTarget",
            "Record": "outbox.sink.decoding.records:Record",
            "RecordDecoder": "outbox.sink.decoding.decoder:RecordDecoder",
            "Rejection": "outbox.events.schema:Rejection",
            "SinkJob": "outbox.sink.spec:SinkJob",
            "Skipped": "outbox.sink.decoding.decoder:Skipped",
            "TopicTarget": "outbox.sink.applying.topics:TopicTarget",
            "load_connector": "outbox.relay.connectors:load",
            "load_schema": "outbox.events.schema:load",
            "parse_json": "outbox.events.values:parse_json",
        },
    )

__all__ = [
    "UUID",
    "Column",
    "DecodedEvent",
    "IcebergTarget",
    "LakehouseTarget",
    "PostgresTarget",
    "Record",
    "RecordDecoder",
    "Rejection",
    "SinkJob",
    "Skipped",
    "TopicTarget",
    "load_connector",
    "load_schema",
    "parse_json",
]
