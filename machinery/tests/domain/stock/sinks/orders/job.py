"""Order events in, orders out: all events of one aggregate."""

from outbox.sinks import SinkJob

job = SinkJob(events=["order"])
