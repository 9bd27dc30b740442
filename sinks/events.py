"""The event of the sample, as the sinks read it: connect/events/ledger-event.v1.schema.json says what is valid."""

from __future__ import annotations

from pyspark.sql import DataFrame

from outbox.event import Contract
from outbox.sink.decode import decode

KEY = "account_id"
# The columns of sinks/staged.sql that come out of the event's properties.
COLUMNS = ("account_id", "amount", "currency", "balance_after", "version", "occurred_at")


def events(records: DataFrame) -> DataFrame:
    """Decode ledger events: valid ones with the columns of sinks/staged.sql, others with their ``record``."""
    decoded = decode(records, Contract().schema, KEY)
    return decoded.select("event_id", "partition", "offset", *COLUMNS, "record")
