"""Balances, without recognising duplicates: it shows what goes wrong then. One counts how often it applies each event.

Optional: to do without, delete this folder.
"""

from pathlib import Path

from outbox.sinks import SinkJob

BALANCES = SinkJob(name="balances", events=["balance"], projections=Path("../balances/projections"))

jobs = [BALANCES.by(Path("strategies") / name) for name in ("naive.sql", "naive-logged.sql")]
