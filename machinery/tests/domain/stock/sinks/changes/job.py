"""Changes of the table `items` in, stock out: raw CDC by a second connector."""

from __future__ import annotations

from pathlib import Path

from outbox import Settings
from outbox.sinks import SinkJob, load_connector
from stock.sinks.changes.records import ChangeDecoder


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `changes`, of the topic that its connector names."""
    decoders = {load_connector(settings, "changes").topic: ChangeDecoder()}
    return [SinkJob(decoders=decoders, strategy=Path("strategies/changes.sql"), carries="states")]
