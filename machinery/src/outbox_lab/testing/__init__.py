"""The public API for a project's tests (docs/reference.md). It needs pytest and hypothesis: the extra `testing`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.base.heavy import exports

if TYPE_CHECKING:
    from outbox.base.settings import SinkRole, SourceRole
    from outbox.base.wait import wait_for
    from outbox_lab.testing.asgi import Application, as_wsgi
    from outbox_lab.testing.command import run
    from outbox_lab.testing.helpers import (
        ServiceClient,
        all_at_once,
        check_events,
        chosen_seed,
        outbox_records,
        query,
        seeded,
    )
    from outbox_lab.testing.sinks import deliver, differing_keys, rebuild
    from outbox_lab.testing.transform_rules import check_transform, example_events
else:  # when they are used: the watchdog of a test run, which is a module of this package, needs none of them
    __getattr__ = exports(
        __name__,
        {
            "Application": "outbox_lab.testing.asgi:Application",
            "ServiceClient": "outbox_lab.testing.helpers:ServiceClient",
            "SinkRole": "outbox.base.settings:SinkRole",
            "SourceRole": "outbox.base.settings:SourceRole",
            "all_at_once": "outbox_lab.testing.helpers:all_at_once",
            "as_wsgi": "outbox_lab.testing.asgi:as_wsgi",
            "check_events": "outbox_lab.testing.helpers:check_events",
            "check_transform": "outbox_lab.testing.transform_rules:check_transform",
            "chosen_seed": "outbox_lab.testing.helpers:chosen_seed",
            "deliver": "outbox_lab.testing.sinks:deliver",
            "differing_keys": "outbox_lab.testing.sinks:differing_keys",
            "example_events": "outbox_lab.testing.transform_rules:example_events",
            "outbox_records": "outbox_lab.testing.helpers:outbox_records",
            "query": "outbox_lab.testing.helpers:query",
            "rebuild": "outbox_lab.testing.sinks:rebuild",
            "run": "outbox_lab.testing.command:run",
            "seeded": "outbox_lab.testing.helpers:seeded",
            "wait_for": "outbox.base.wait:wait_for",
        },
    )

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
