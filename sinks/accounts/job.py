"""Each account with its status and its turnover, from the events of two aggregates, which come on two topics."""

from outbox.sinks import SinkJob

job = SinkJob(events=["account", "balance"])
