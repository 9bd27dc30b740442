"""Item events in, stock out, without recognising duplicates. It shows what goes wrong then."""

from pathlib import Path

from outbox.sinks import SinkJob

job = SinkJob(events=["item"], strategy=Path("strategies/naive.sql"), projections=Path("../stock/projections"))
