"""The walkthrough, `outbox demo`: it sends traffic, breaks the chain on purpose, and compares every total.

A project describes its clients by a `Workload` (docs/reference.md). Everything else is private.
"""

from outbox.walkthrough.workload import Request, Workload

__all__ = ["Request", "Workload"]
