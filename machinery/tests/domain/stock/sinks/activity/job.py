"""Events of items and of orders in, the activity of each out: a sink of two topics."""

from outbox.sinks import SinkJob

job = SinkJob(events=["item", "order"])
