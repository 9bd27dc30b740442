"""The public API for a project's tests (docs/reference.md). It needs pytest and hypothesis: the extra `testing`."""

from outbox.base.settings import SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.testing.client import ServiceClient
from outbox.testing.command import run
from outbox.testing.events import check_events, outbox_records
from outbox.testing.queries import query
from outbox.testing.seeds import chosen_seed, seeded
from outbox.testing.sinks import deliver, differing_keys, rebuild
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
