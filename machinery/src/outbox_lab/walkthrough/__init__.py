"""The walkthrough, `outbox demo`: it sends traffic, breaks the chain on purpose, and compares every total.

A project describes its clients by a `Workload`, and may have a `Player` that shows the story elsewhere than on the
terminal (docs/reference.md). What is not exported here is private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.base.heavy import exports
from outbox_lab.walkthrough.workload import Request, Workload

if TYPE_CHECKING:
    from outbox.base.database import connect
    from outbox.base.settings import SinkRole, SourceRole
    from outbox.kafka.clients import client_config, consumer_config
    from outbox.kafka.records import headers_of
    from outbox.relay.lifecycle import status as connector_status
    from outbox.sink.discovery import sinks as sink_specs
    from outbox_lab.stack.process import Process as Part
    from outbox_lab.walkthrough.chain import Chain
    from outbox_lab.walkthrough.faults import Checkpoint, crash_sinks, rewind_sink, terminate_replication
    from outbox_lab.walkthrough.story import Phase, Player, Screen, Step, Story
else:  # when they are used: a workload needs none of them
    NAMES = {
        "outbox.base.database": ["connect"],
        "outbox.base.settings": ["SinkRole", "SourceRole"],
        "outbox.kafka.clients": ["client_config", "consumer_config"],
        "outbox.kafka.records": ["headers_of"],
        "outbox_lab.walkthrough.chain": ["Chain"],
        "outbox_lab.walkthrough.faults": ["Checkpoint", "crash_sinks", "rewind_sink", "terminate_replication"],
        "outbox_lab.walkthrough.story": ["Phase", "Player", "Screen", "Step", "Story"],
    }
    __getattr__ = exports(
        __name__,
        {
            "Part": "outbox_lab.stack.process:Process",
            "connector_status": "outbox.relay.lifecycle:status",
            "sink_specs": "outbox.sink.discovery:sinks",
            **{name: f"{module}:{name}" for module, names in NAMES.items() for name in names},
        },
    )

__all__ = [
    "Chain",
    "Checkpoint",
    "Part",
    "Phase",
    "Player",
    "Request",
    "Screen",
    "SinkRole",
    "SourceRole",
    "Step",
    "Story",
    "Workload",
    "client_config",
    "connect",
    "connector_status",
    "consumer_config",
    "crash_sinks",
    "headers_of",
    "rewind_sink",
    "sink_specs",
    "terminate_replication",
]
