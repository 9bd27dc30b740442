"""Balances, without recognising duplicates. It shows what goes wrong then.

Optional: to do without, delete this folder.
"""

from pathlib import Path

from outbox.sinks import SinkJob

job = SinkJob(
    name="balances-naive",
    events=["balance"],
    strategy=Path("strategies/naive.sql"),
    projections=Path("../balances/projections"),
)
