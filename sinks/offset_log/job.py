"""Balances, with each event stored under (topic, partition, offset).

Many believe that this is enough. It does not survive a re-send.

Optional: to do without, delete this folder.
"""

from pathlib import Path

from outbox.sinks import SinkJob

BALANCES = SinkJob(name="balances", events=["balance"], projections=Path("../balances/projections"))

job = BALANCES.by(Path("strategies/offset-log.sql"))
