"""The pieces of each product, from the movements of the stock."""

from outbox.sinks import SinkJob

job = SinkJob(events=["stock"])
