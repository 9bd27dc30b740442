"""Orders in a warehouse: every event once, and the newest state of each order."""

from outbox.sinks import SinkJob

job = SinkJob(events=["order"], target="sinks.warehouse.target:write")
