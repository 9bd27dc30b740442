"""The money that was moved each day, in euros: a job with PySpark of its own (docs/spark.md).

Optional: to do without, delete this folder, tests/pipeline/test_turnover.py, tests/integration/test_in_euros.py and
migrations/sink/0003_turnover.py, and let the next migration come after sink_domain_0002.
"""

from outbox.sinks import SinkJob

# Of the two events of a transfer it takes the credit, so that each amount counts once.
job = SinkJob(events=["balance.credited"], transform="sinks.turnover.transform:in_euros")
