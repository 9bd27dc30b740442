"""The public API for DataFrames: read the events of topics, and try a transform (docs/spark.md)."""

from outbox.sink.spark.frame import events
from outbox.sink.spark.rules import check as check_transform
from outbox.sink.spark.rules import events as example_events
from outbox.sink.spark.session import session

__all__ = ["check_transform", "events", "example_events", "session"]
