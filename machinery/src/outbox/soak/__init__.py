"""The soak: clients, faults on every hop, and a verdict on what they left. `outbox soak` runs it on a project's domain.

A project's file ``demo/soak.py`` is written with the names below (docs/soak.md).
"""

from outbox.soak.domain import Domain, Refusal, TableCopy
from outbox.soak.foreign import ForeignEvent
from outbox.soak.history import Attempt, History
from outbox.soak.releases import OlderRelease
from outbox.soak.seen import TopicEvent
from outbox.walkthrough.workload import Request

__all__ = [
    "Attempt",
    "Domain",
    "ForeignEvent",
    "History",
    "OlderRelease",
    "Refusal",
    "Request",
    "TableCopy",
    "TopicEvent",
]
