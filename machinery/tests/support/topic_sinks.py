"""Sinks whose targets are topics; and `outbox` with them, as a program that a signal hits at a step of a transaction.

    python -m tests.support.topic_sinks STEP SIGNAL NUMBER sink --plain copies

The signal comes behind this step of the transaction of this number. Everything else of the process is the product's.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from outbox.base.settings import Settings
from outbox.base.wait import timeout_scale
from outbox.cli import main
from outbox.handlers import Event
from outbox.kafka import topics
from outbox.kafka.spec import TopicSpec
from outbox.kafka.transactions import Transactions
from outbox.sink import discovery
from outbox.sink.running import plain, supervisor
from outbox.sink.spec import SinkSpec
from outbox.sinks import SinkJob, TopicTarget
from outbox_lab.testing.command import environment
from tests import items
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
    """The sinks of these names."""
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
    """Run these sinks in a process of their own until the signal hits it."""
    arguments = [step, hit.name, str(number), "sink", "--plain", *names, "--until-caught-up"]
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *arguments],
        cwd=ROOT,
        env=environment(settings.home, **settings.as_env(), PYTHONPATH=str(ROOT)),
        stderr=subprocess.PIPE,
        text=True,
    )


def killed(settings: Settings, step: str, number: int, *names: str) -> None:
    """Run these sinks in a process that is killed behind a step of a transaction."""
    process = start_faulty(settings, step, signal.SIGKILL, number, *names)
    _, said = process.communicate(timeout=TIMEOUT_S * timeout_scale())
    assert process.returncode == -signal.SIGKILL, said
    assert FIRED in said, said


class Hit:
    """A producer: the process gets a signal behind a step of one of its transactions."""

    def __init__(self, producer: Any, step: str, which: signal.Signals, number: int) -> None:
        self._producer, self._step, self._which, self._number = producer, step, which, number
        self._counts = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._producer, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if name == "send_offsets_to_transaction" and self._step == "produce":
                self._producer.flush(TIMEOUT_S)
                self._hit("produce")
            done = function(*arguments, **named)
            if name == self._step != "produce":
                self._hit(name)
            return done

        return call

    def _hit(self, step: str) -> None:
        self._counts[step] += 1
        if self._counts[step] == self._number:
            print(FIRED, file=sys.stderr, flush=True)  # noqa: T201
            # To this thread: with a stop of the process alone, it would go on until another thread has taken that.
            signal.pthread_kill(threading.get_ident(), self._which)


def run_faulty(step: str, which: str, number: str) -> None:
    make = Transactions.__init__

    def make_faulty(self: Transactions, *arguments: Any) -> None:
        make(self, *arguments)
        self._producer = Hit(self._producer, step, signal.Signals[which], int(number))  # type: ignore[assignment]

    Transactions.__init__ = make_faulty  # type: ignore[assignment,method-assign]
    plain.PART_MAX_RECORDS = PART_RECORDS
    discovery.jobs = jobs
    main()


if __name__ == "__main__":
    run_faulty(*(sys.argv.pop(1) for _ in range(3)))
