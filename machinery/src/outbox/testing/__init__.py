"""The public API for a project's tests (docs/reference.md). It needs pytest and hypothesis: the extra `testing`."""

from outbox.base.settings import SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.testing.client import ServiceClient
from outbox.testing.command import run
from outbox.testing.comparisons import differing_keys
from outbox.testing.events import check_events
from outbox.testing.queries import query
from outbox.testing.rebuilds import rebuild
from outbox.testing.records import deliver, outbox_records
from outbox.testing.seeds import chosen_seed, seeded
from outbox.testing.threads import all_at_once

__all__ = [
    "ServiceClient",
    "SinkRole",
    "SourceRole",
    "all_at_once",
    "check_events",
    "chosen_seed",
    "deliver",
    "differing_keys",
    "outbox_records",
    "query",
    "rebuild",
    "run",
    "seeded",
    "wait_for",
]
