"""Each event of a balance once more, on a topic for other teams: the topic LEDGER.feed, which an operator creates.

Optional: to do without, delete this folder, and its name in demo/soak.py.
"""

from outbox import Settings
from outbox.sinks import SinkJob, TopicTarget


def jobs(settings: Settings) -> list[SinkJob]:
    """The sink `feed`, whose topic begins as those that it reads."""
    return [SinkJob(events=["balance"], target=TopicTarget(f"{settings.topic_prefix}.feed"))]
