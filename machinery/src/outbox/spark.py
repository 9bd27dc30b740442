"""The public API for DataFrames: read the events of topics, and try a transform (docs/spark.md)."""

from outbox.sink.frames.frame import events
from outbox.sink.frames.rules import check as check_transform
from outbox.sink.frames.rules import events as example_events
from outbox.sink.spark.session import session

__all__ = ["check_transform", "events", "example_events", "session"]
