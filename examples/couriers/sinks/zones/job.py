"""Who is in each zone. Each event counts, as it clears the row of the zone before."""

from outbox.sinks import SinkJob

job = SinkJob(events=["courier"], target="sinks.zones.target:write")
