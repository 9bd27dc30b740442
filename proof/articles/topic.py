"""From topic to topic: a sink writes events to another topic, killed at every step; and where exactly-once ends.

Run as a program, this module is `outbox` with these sinks. A process that gets a step kills itself behind that step of
its second transaction.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from confluent_kafka import TopicPartition
from outbox.base.settings import Settings
from outbox.base.wait import timeout_scale, wait_for
from outbox.cli import main
from outbox.kafka import topics
from outbox.kafka.clients import consumer
from outbox.kafka.spec import TopicSpec
from outbox.kafka.transactions import Transactions
from outbox.relay import arrivals
from outbox.sink import discovery
from outbox.sink.running import plain
from outbox.sinks import SinkJob, TopicTarget

from proof.articles.chain import Chain, Topic, own_chain
from proof.articles.experiment import Experiment, NotFired, Report, Seen
from proof.articles.history import Delivery, compare
from proof.articles.writer import write, writing

EVENTS = 5_000
STEPS = ("begin_transaction", "produce", "send_offsets_to_transaction", "commit_transaction")
STRATEGIES = ("dedup", "offsets")
PART_RECORDS = 100  # of a transaction, so that a run has several
TIMEOUT_S = 120.0
FIRED = "killed by itself"


def killed(events: int, report: Report) -> Seen:
    """Kill the sink behind each step of a transaction, then let it catch up."""
    with own_chain(report, exactly_once=True) as chain:
        chain.apply()
        write(chain.settings, events)
        chain.drained()
        _create_targets(chain.settings)
        for step in STEPS:
            _run(chain.settings, "dedup", kill_behind=step)
            report(f"killed behind {step}")
        _run(chain.settings, "dedup")
        delivery = _delivery(chain, "dedup")
        uncommitted = compare(set(chain.written()), _uncommitted(chain.settings, _target("dedup")))
        return Seen(
            f"read_committed: {delivery}; read_uncommitted: {uncommitted}",
            delivery.is_exactly_once and uncommitted.is_complete and uncommitted.duplicates > 0,
        )


def repeated(events: int, report: Report) -> Seen:
    """Let the relay send events again, which have other offsets then, and two strategies write them on."""
    with own_chain(report, exactly_once=False) as chain:
        chain.apply(exactly_once_support="requested")
        with writing(chain.settings, events // 2) as writer:
            chain.wait_progress(events // 4)
            writer.allow(events)
            chain.kill_worker()
            chain.stack.up(["connect"], report=report)
            writer.wait_committed(events)
        first = chain.drained()
        if not first.duplicates:
            raise NotFired("the relay has sent nothing again")
        _create_targets(chain.settings)
        for strategy in STRATEGIES:
            _run(chain.settings, strategy)
        found = {strategy: _delivery(chain, strategy) for strategy in STRATEGIES}
        return Seen(
            f"on the first topic: {first}; " + "; ".join(f"`{name}`: {one}" for name, one in found.items()),
            found["dedup"].is_exactly_once and found["offsets"].duplicates == first.duplicates,
        )


def jobs(settings: Settings) -> list[SinkJob]:
    """A sink that copies the balances, and the same by positions alone."""
    del settings
    return [
        SinkJob(strategy, events=["balance"], strategy=strategy, target=TopicTarget(_target(strategy)))
        for strategy in STRATEGIES
    ]


def _target(strategy: str) -> str:
    return f"copies-{strategy}"


def _create_targets(settings: Settings) -> None:
    topics.create(settings, [TopicSpec(_target(strategy), 4, {}) for strategy in STRATEGIES])


def _delivery(chain: Chain, strategy: str) -> Delivery:
    copies = Topic(chain.settings, _target(strategy), lambda message: str(arrivals.header_id(message)))
    return compare(set(chain.written()), copies.read())


def _uncommitted(settings: Settings, topic: str) -> list[str]:
    """The ids in all records of a topic, those of aborted transactions too."""
    ends, found = topics.high_watermarks(settings, topic), list[str]()
    with consumer(settings, "read_uncommitted") as client:
        client.assign([TopicPartition(topic, number, 0) for number in ends])

        def is_read() -> bool:
            found.extend(str(arrivals.header_id(message)) for message in client.consume(10_000, 0.1))
            places = client.position([TopicPartition(topic, number) for number in ends])
            return all(place.offset >= ends[place.partition] or not ends[place.partition] for place in places)

        wait_for("all records", is_read, timeout_s=TIMEOUT_S)
    return found


def _run(settings: Settings, sink: str, *, kill_behind: str = "") -> None:
    """Let a sink catch up. With a step, raises NotFired unless it was killed behind that."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, kill_behind, "sink", "--plain", sink, "--until-caught-up"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **settings.as_env()},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * timeout_scale(),
        check=False,
    )
    if kill_behind and (done.returncode != -signal.SIGKILL or FIRED not in done.stderr):
        raise NotFired(f"the sink was not killed behind {kill_behind}: {done.stderr[-500:]}")
    if not kill_behind and done.returncode:
        raise RuntimeError(f"sink {sink}: {done.stderr[-500:]}")


class Mortal:
    """A producer whose process is killed behind a step of its second transaction."""

    def __init__(self, producer: Any, step: str) -> None:
        self._producer, self._step, self._counts = producer, step, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if name == "send_offsets_to_transaction" and self._step == "produce":
                self._producer.flush()
                self._die("produce")
            done = getattr(self._producer, name)(*arguments, **named)
            if name == self._step != "produce":
                self._die(name)
            return done

        return call

    def _die(self, step: str) -> None:
        self._counts[step] += 1
        if self._counts[step] == 2:  # noqa: PLR2004
            print(FIRED, file=sys.stderr, flush=True)  # noqa: T201
            os.kill(os.getpid(), signal.SIGKILL)


def _outbox(step: str) -> None:
    make = Transactions.__init__

    def make_mortal(self: Transactions, *arguments: Any) -> None:
        make(self, *arguments)
        self._producer = Mortal(self._producer, step)  # type: ignore[assignment]

    Transactions.__init__ = make_mortal  # type: ignore[assignment,method-assign]
    plain.PART_MAX_RECORDS = PART_RECORDS
    discovery.jobs = jobs
    main()


EXPERIMENTS = [
    Experiment(
        "topic-to-topic",
        "{events} commits; a sink writes them to another topic, killed (SIGKILL) behind each step of a transaction: "
        "begin, produce, send offsets, commit",
        "exactly once within Kafka: nothing lost, no duplicates at `read_committed`; duplicates at `read_uncommitted`",
        EVENTS,
        killed,
    ),
    Experiment(
        "topic-to-topic-repeats",
        "worker `disabled`, killed during {events} commits; two sinks write the topic to others, by `dedup` and by "
        "`offsets`",
        "where it ends: events that the relay sends again are new to Kafka's transactions; `dedup` writes each once, "
        "`offsets` as often as they came",
        EVENTS,
        repeated,
    ),
]

if __name__ == "__main__":
    _outbox(sys.argv.pop(1))
