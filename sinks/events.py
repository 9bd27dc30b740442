"""The event of the sample, as the sinks read it: connect/events/ledger-event.v1.schema.json says what is valid."""

from __future__ import annotations

from pyspark.sql import DataFrame

from outbox.event import Contract
from outbox.sink.decode import decode

# The columns of sinks/staged.sql that come out of the event's properties.
COLUMNS = ("account_id", "amount", "currency", "balance_after", "version", "occurred_at")


def events(records: DataFrame) -> DataFrame:
    """Decode ledger events: good ones with the columns of sinks/staged.sql, bad ones with the reason."""
    decoded = decode(records, Contract().schema, key="account_id")
    return decoded.select("event_id", "partition", "offset", *COLUMNS, "reason", "detail", "record")
