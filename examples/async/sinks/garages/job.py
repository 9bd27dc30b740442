"""How many cars are in each garage, from the events of garages."""

from outbox.sinks import SinkJob

job = SinkJob(events=["garage"])
