"""The public API for sinks: what a module ``job`` declares (docs/projections.md), and decoders of other records."""

from outbox.events.schema import Column, Rejection
from outbox.events.schema import load as load_schema
from outbox.events.values import parse_json
from outbox.relay.connectors import load as load_connector
from outbox.sink.applying.lakehouse.target import LakehouseTarget
from outbox.sink.applying.postgres.target import PostgresTarget
from outbox.sink.decoding.decoder import UUID, DecodedEvent, RecordDecoder, Skipped
from outbox.sink.decoding.records import Record
from outbox.sink.spec import SinkJob

__all__ = [
    "UUID",
    "Column",
    "DecodedEvent",
    "LakehouseTarget",
    "PostgresTarget",
    "Record",
    "RecordDecoder",
    "Rejection",
    "SinkJob",
    "Skipped",
    "load_connector",
    "load_schema",
    "parse_json",
]
