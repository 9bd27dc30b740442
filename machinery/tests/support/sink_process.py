"""Shared by the tests of sinks as processes: a publisher, sinks that run, and what they have logged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random
from typing import TypeVar
from urllib.parse import unquote, urlparse

from confluent_kafka import Producer

from outbox.base.settings import Settings
from outbox.base.wait import timeout_scale, wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.sink import discovery
from outbox.sink.decoding.records import Record
from outbox_lab.stack.command import Command, SinkProcess
from outbox_lab.testing.command import environment, outbox
from tests import items
from tests.support import faulty_sink
from tests.support.made_events import NOW_MS, Event, nth_key, uuid7
from tests.support.paths import ROOT
from tests.support.sink_driver import Database
from tests.support.topic_reader import topic_of
from tests.support.warm_jvm import WarmJvm, WarmSink

RANDOM = Random(11)  # noqa: S311
TIMEOUT_S = 120
PLAIN = "--plain"
S = TypeVar("S", bound=Command)


class Publisher:
    """Writes events to the topic as the connector does: in transactions, some of which are aborted."""

    def __init__(self, settings: Settings, continued: Publisher | None = None) -> None:
        """``continued`` is another one, which this one takes the place of: the keys go on as it left them."""
        self._topic = topic_of(settings)
        config = {"transactional.id": f"test-{settings.topic_prefix}", "linger.ms": 5, "log_level": 0}
        self._producer = Producer({**client_config(settings), **config})
        self._producer.init_transactions()
        self.versions: dict[str, int] = {} if continued is None else continued.versions
        self.totals: dict[str, int] = {} if continued is None else continued.totals

    def events(self, count: int, keys: int = 5) -> list[Event]:
        """Fresh events, in the order of their keys' versions, all quantities different."""
        return [self._event(nth_key(number % keys), 1 + RANDOM.randrange(1_000_000)) for number in range(count)]

    def send(self, events: Sequence[Event], *, abort: bool = False) -> None:
        """Publish events in one transaction."""
        self.send_records(self._topic, [event.record for event in events], abort=abort)

    def send_records(self, topic: str, records: Sequence[Record], *, abort: bool = False) -> None:
        """Publish records on any topic in one transaction."""
        self._producer.begin_transaction()
        for record in records:
            self._producer.produce(topic, key=record.key, value=record.value, headers=list(record.headers))
        self._end(abort)

    def send_raw(self, key: str | None, value: bytes | None, event_id: str | None) -> None:
        """Publish whatever this is."""
        headers = {"eventType": items.MORE, "schemaVersion": "1"} | ({} if event_id is None else {"id": event_id})
        encoded = [(name, text.encode()) for name, text in headers.items()]
        self.send_records(self._topic, [Record(None if key is None else key.encode(), encoded, value, NOW_MS)])

    def _event(self, key: str, quantity: int) -> Event:
        version = self.versions.get(key, 0) + 1
        self.versions[key] = version
        self.totals[key] = total = self.totals.get(key, 0) + quantity
        return Event(uuid7(RANDOM), key, quantity, version, total_after=total)

    def _end(self, abort: bool) -> None:
        self._producer.flush(10)
        if abort:
            self._producer.abort_transaction(10)
        else:
            self._producer.commit_transaction(10)


def catch_up(settings: Settings, *names: str) -> subprocess.CompletedProcess[str]:
    """Run `outbox sink --until-caught-up` to its end, in the JVM that the runs of a home folder share."""
    return _warm_jvm(settings, names).run(settings, *sink_arguments(*names), "--until-caught-up")


def _warm_jvm(settings: Settings, names: Sequence[str]) -> WarmJvm:
    """The JVM for these sinks; other words are ignored."""
    known = discovery.sinks(settings)
    return WarmJvm(settings, with_jars=any(known[name].target.jars for name in names if name in known))


def catch_up_alone(settings: Settings, *names: str) -> subprocess.CompletedProcess[str]:
    """`catch_up` with a JVM that belongs to the process."""
    return outbox(*sink_arguments(*names), "--until-caught-up", home=settings.home, **settings.as_env())


def catch_up_plain(settings: Settings, *names: str) -> subprocess.CompletedProcess[str]:
    """`catch_up` without Spark."""
    return catch_up_alone(settings, PLAIN, *names)


def catch_up_faulty(
    fault: str, settings: Settings, *names: str, is_alone: bool = False
) -> subprocess.CompletedProcess[str]:
    """`catch_up` with a fault of `tests.support.faulty_sink`; in a JVM of its own if it is to be alone."""
    return run_faulty(fault, settings, *sink_arguments(*names), "--until-caught-up", is_alone=is_alone)


def run_faulty(
    fault: str, settings: Settings, *arguments: str, is_alone: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run `outbox` with a fault to its end."""
    jvm = _warm_jvm(settings, arguments)
    if not is_alone:
        jvm.start()
    return subprocess.run(
        [sys.executable, "-m", faulty_sink.__name__, fault, *arguments],
        cwd=ROOT,
        env=environment(settings.home, **settings.as_env(), **({} if is_alone else jvm.gateway())),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * timeout_scale(),
        check=False,
    )


def sink_arguments(*names: str) -> list[str]:
    """`outbox sink` with these sinks, or with `dedup`."""
    return ["sink", *(names or ("dedup",))]


def logged(done: subprocess.CompletedProcess[str], event: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def reported_failure(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that reported the failure."""
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("outbox: ")]
    return line


def checkpoint(settings: Settings, sink: str = "dedup") -> Path:
    return Path(unquote(urlparse(settings.checkpoints).path), sink)


def running(settings: Settings, *names: str) -> AbstractContextManager[SinkProcess]:
    """Sinks that run until told otherwise, with a JVM that belongs to the process; killed at the end of the block."""
    sink = SinkProcess(f"sink-{settings.topic_prefix}", settings, sink_arguments(*names))
    return within(sink, sink.kill)


def running_plain(settings: Settings, *names: str) -> AbstractContextManager[SinkProcess]:
    """`running` without Spark."""
    return running(settings, PLAIN, *names)


def running_warm(settings: Settings, *names: str) -> AbstractContextManager[WarmSink]:
    """Sinks that run until told otherwise, in the JVM that the runs share; asked to stop at the end of the block."""
    return running_faulty("", settings, *names)


def running_faulty(fault: str, settings: Settings, *names: str) -> AbstractContextManager[WarmSink]:
    """`running_warm` with a fault of `tests.support.faulty_sink`."""
    sink = WarmSink(settings, sink_arguments(*names), fault)
    return within(sink, sink.stop)


@contextmanager
def within(sink: S, end: Callable[[], None]) -> Iterator[S]:
    """Run a sink during the block. The end of its log is printed if the block fails."""
    sink.start_timeout_s = TIMEOUT_S
    sink.spawn()
    try:
        yield sink
    except BaseException:
        print(sink.tail(30))  # noqa: T201
        raise
    finally:
        end()


def wait_applied(sink: Command, database: Database, count: int, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until the sink has applied so many events."""

    def applied() -> bool:
        assert sink.is_running(), sink.tail()
        return database.applied() >= count

    wait_for(f"{count} events applied", applied, timeout_s=timeout_s)


def wait_caught_up(sink: Command, settings: Settings, names: Sequence[str]) -> None:
    """Wait until these sinks have applied all that their topics have committed now."""
    ends = {
        (name, topic): topics.last_stable_offsets(settings, topic)
        for name, one in discovery.sinks(settings).items()
        if name in names
        for topic in one.topics
    }

    def reached() -> bool:
        assert sink.is_running(), sink.tail()
        found = [(end, Database(settings, name).positions(topic)) for (name, topic), end in ends.items()]
        return all(positions.get(one, 0) >= offset for end, positions in found for one, offset in end.items())

    wait_for(f"{', '.join(names)} to have caught up", reached, timeout_s=TIMEOUT_S)
