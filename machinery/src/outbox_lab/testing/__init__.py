"""The public API for a project's tests (docs/reference.md). It needs pytest and hypothesis: the extra `testing`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.base.heavy import exports

if TYPE_CHECKING:
    from outbox.base.settings import SinkRole, SourceRole
    from outbox.base.wait import wait_for
    from outbox_lab.testing.command import run
    from outbox_lab.testing.helpers import (
        Application,
        ServiceClient,
        all_at_once,
        as_wsgi,
        check_events,
        chosen_seed,
        outbox_records,
        query,
        seeded,
    )
    from outbox_lab.testing.sinks import deliver, differing_keys, rebuild
    from outbox_lab.testing.transform_rules import check_transform, example_events
else:  # when they are used: the watchdog of a test run, which is a module of this package, needs none of them
    NAMES = {
        "outbox.base.settings": ["SinkRole", "SourceRole"],
        "outbox.base.wait": ["wait_for"],
        "outbox_lab.testing.command": ["run"],
        "outbox_lab.testing.helpers": [
            *("Application", "ServiceClient", "all_at_once", "as_wsgi", "check_events", "chosen_seed"),
            *("outbox_records", "query", "seeded"),
        ],
        "outbox_lab.testing.sinks": ["deliver", "differing_keys", "rebuild"],
        "outbox_lab.testing.transform_rules": ["check_transform", "example_events"],
    }
    __getattr__ = exports(__name__, {name: f"{module}:{name}" for module, names in NAMES.items() for name in names})

__all__ = [
    "Application",
    "ServiceClient",
    "SinkRole",
    "SourceRole",
    "all_at_once",
    "as_wsgi",
    "check_events",
    "check_transform",
    "chosen_seed",
    "deliver",
    "differing_keys",
    "example_events",
    "outbox_records",
    "query",
    "rebuild",
    "run",
    "seeded",
    "wait_for",
]
