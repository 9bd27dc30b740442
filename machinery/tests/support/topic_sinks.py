"""Sinks whose targets are topics, in this process or in one that a signal hits at a step of a transaction."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from outbox.base.settings import Settings
from outbox.base.wait import timeout_scale
from outbox.handlers import Event
from outbox.kafka import topics
from outbox.kafka.spec import TopicSpec
from outbox.sink import discovery
from outbox.sink.running import plain, supervisor
from outbox.sink.spec import SinkSpec
from outbox.sinks import SinkJob, TopicTarget
from outbox_lab.testing.command import environment
from tests import items
from tests.support import faulty_sink
from tests.support.paths import ROOT
from tests.support.topic_reader import delete_topics

STEPS = ("begin_transaction", "produce", "send_offsets_to_transaction", "commit_transaction")
PARTITIONS, PART_RECORDS, TIMEOUT_S = 3, 40, 60
FIRED = "the fault has fired"


def by_unit(event: Event) -> Event | None:
    """The event under its unit; none of what is picked."""
    return event._replace(key=event.payload["unit"]) if event.payload["quantity"] > 0 else None


RETURNS = dict[str, Callable[[Event], Any]]()  # by the id of an event


def odd(event: Event) -> Any:
    """The event as the test wants it written."""
    return RETURNS[event.id](event) if event.id in RETURNS else event


def jobs(settings: Settings) -> list[SinkJob]:
    """A sink that copies events, and others that give them other keys and leave some out."""
    by, units = "tests.support.topic_sinks:by_unit", units_of(settings)
    return [
        SinkJob("copies", events=[items.AGGREGATE], target=TopicTarget(copies_of(settings))),
        SinkJob("units", events=[items.AGGREGATE], target=TopicTarget(units, by)),
        SinkJob("repeats", events=[items.AGGREGATE], strategy="offsets", target=TopicTarget(units, by)),
        SinkJob("picked", events=[items.AGGREGATE], transform="tests.transforms:picky", target=TopicTarget(units)),
        SinkJob("orders", events=["order"], target=TopicTarget(units)),
        SinkJob("odd", events=[items.AGGREGATE], target=TopicTarget(units, "tests.support.topic_sinks:odd")),
    ]


def copies_of(settings: Settings) -> str:
    return f"{settings.topic_prefix}.copies"


def units_of(settings: Settings) -> str:
    return f"{settings.topic_prefix}.units"


def specs(settings: Settings, *names: str) -> list[SinkSpec]:
    return [discovery.resolve(settings, job) for job in jobs(settings) if job.name in names]


@contextmanager
def target_topics(settings: Settings, **config: str) -> Iterator[None]:
    """The target topics, deleted at the end."""
    names = [copies_of(settings), units_of(settings)]
    topics.create(settings, [TopicSpec(name, PARTITIONS, config) for name in names])
    yield
    delete_topics(settings, *names)


def catch_up(settings: Settings, *names: str) -> None:
    """Let these sinks apply all that their topics have, in this process."""
    supervisor.run(settings, specs(settings, *names), engine=plain.plain_engine, until_caught_up=True)


def start_faulty(settings: Settings, step: str, hit: signal.Signals, number: int, *names: str) -> subprocess.Popen[str]:
    """Run these sinks in a process of their own, which a signal hits behind a step of the transaction of a number."""
    fault = f"signal_in_transaction:{step}:{hit.name}:{number}"
    return subprocess.Popen(
        [sys.executable, "-m", faulty_sink.__name__, fault, "sink", "--plain", *names, "--until-caught-up"],
        cwd=ROOT,
        env=environment(settings.home, **settings.as_env()),
        stderr=subprocess.PIPE,
        text=True,
    )


def killed(settings: Settings, step: str, number: int, *names: str) -> None:
    """Run these sinks in a process that is killed behind a step of a transaction."""
    process = start_faulty(settings, step, signal.SIGKILL, number, *names)
    _, said = process.communicate(timeout=TIMEOUT_S * timeout_scale())
    assert (process.returncode, FIRED in said) == (-signal.SIGKILL, True), said
