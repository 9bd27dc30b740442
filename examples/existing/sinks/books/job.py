"""How many copies of each book are lent, from the events of books."""

from outbox.sinks import SinkJob

job = SinkJob(events=["book"])
