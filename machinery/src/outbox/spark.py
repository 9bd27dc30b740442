"""The public API for DataFrames: read the events of topics (docs/spark.md)."""

from outbox.sink.frames.frame import events
from outbox.sink.spark.session import session

__all__ = ["events", "session"]
