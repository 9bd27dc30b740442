"""The balance of each account, from the events of balances; beside it, to compare, the same by other strategies."""

from outbox.sinks import SinkJob

BALANCES = SinkJob(name="balances", events=["balance"])

jobs = [BALANCES, *(BALANCES.by(strategy) for strategy in ("merge", "offsets", "upsert", "versions"))]
