"""The parcels of each depot, from the events of depots."""

from outbox.sinks import SinkJob

job = SinkJob(events=["depot"])
