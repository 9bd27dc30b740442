"""The event of the sample, as the sinks read it: connect/events/ledger-event.v1.schema.json says what is valid."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outbox.base import project
from outbox.writing.contract import Contract

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEY = "account_id"
# The columns of sinks/staged.sql that come out of the event's properties, each named as its property: by these names a
# replay of dead letters finds them too.
COLUMNS = ("account_id", "amount", "currency", "balance_after", "version", "occurred_at")


def schema_file() -> Path:
    """The contract of the events."""
    return project.current().connect / "events" / "ledger-event.v1.schema.json"


def events(records: DataFrame) -> DataFrame:
    """Decode ledger events: valid ones with the columns of sinks/staged.sql, others with their ``record``. Without
    ``traceparent`` the log would not tell of traced events.
    """
    from outbox.sink.decode import decode  # it loads Spark, which a replay of dead letters does without

    decoded = decode(records, Contract(schema_file()).schema, KEY)
    return decoded.select("event_id", "partition", "offset", *COLUMNS, "traceparent", "record")
