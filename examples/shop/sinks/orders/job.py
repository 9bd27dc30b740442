"""The state of each order, from its events in order."""

from outbox.sinks import SinkJob

job = SinkJob(events=["order"])
