"""The soak: clients, faults on every hop, and a verdict on what they left. `outbox soak` runs it on a project's domain.

A project's file ``demo/soak.py`` is written with the names below (docs/soak.md).
"""

from outbox_lab.soak.domain import Domain, Effects, Refusal
from outbox_lab.soak.history import Attempt, History, TopicEvent
from outbox_lab.walkthrough.workload import Request

__all__ = [
    "Attempt",
    "Domain",
    "Effects",
    "History",
    "Refusal",
    "Request",
    "TopicEvent",
]
