"""Where each courier is. The newest event of a courier is the whole state."""

from outbox.sinks import SinkJob

job = SinkJob(events=["courier"], strategy="upsert", target="sinks.couriers.target:write")
