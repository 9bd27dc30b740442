"""Orders and cancellations of each day: a history, which no table of the service has."""

from outbox.sinks import SinkJob

job = SinkJob(events=["order"])
