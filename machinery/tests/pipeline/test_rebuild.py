"""Rebuilding on the whole chain, beside a sink that runs and a service that is written to: no drift in the end."""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from outbox.audit import check
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.kafka.clients import client_config
from outbox_lab.stack.command import Command
from outbox_lab.testing.command import outbox
from outbox_lab.testing.helpers import chosen_seed
from tests.stock import Client
from tests.support.made_events import nth_key
from tests.support.sink_driver import Database
from tests.support.sink_process import applied_until, sink_arguments
from tests.support.topic_reader import topic_of
from tests.support.warm_jvm import WarmSink

TIMEOUT_S = 180


class Movements(threading.Thread):
    """A client of the service that moves stock all the time."""

    def __init__(self, client: Client, seed: int) -> None:
        super().__init__(name="movements", daemon=True)
        self._client = client
        self._random = random.Random(seed)  # noqa: S311
        self._halt = threading.Event()
        self.made = 0

    def run(self) -> None:
        items = [nth_key(number) for number in range(6)]
        while not self._halt.wait(0.5):  # each is a batch of the sink: a rebuild beside it needs most of the machine
            quantity = self._random.choice([-1, 1]) * (1 + self._random.randrange(100))
            assert self._client.move(self._random.choice(items), quantity).status_code == 201
            self.made += 1

    def halt(self) -> None:
        self._halt.set()
        self.join(60)
        assert not self.is_alive()

    def wait_for_more(self, count: int = 8) -> None:
        """Wait until so many more movements are made than now."""
        goal = self.made + count
        wait_for(f"{count} more movements", lambda: not self.is_alive() or self.made >= goal, timeout_s=TIMEOUT_S)
        assert self.is_alive()


@contextmanager
def moving(client: Client) -> Iterator[Movements]:
    movements = Movements(client, chosen_seed())
    movements.start()
    try:
        yield movements
    finally:
        movements.halt()


@contextmanager
def running(settings: Settings) -> Iterator[Command]:
    """The sink `dedup`, surely no longer than the block."""
    sink = WarmSink("sink-dedup", settings, sink_arguments("dedup"))
    sink.start_timeout_s = TIMEOUT_S
    sink.start()
    try:
        yield sink
    finally:
        sink.stop()


def rebuild(settings: Settings, *words: str) -> subprocess.CompletedProcess[str]:
    return outbox("rebuild", "dedup", *words, home=settings.home, **settings.as_env())


def spoil(settings: Settings) -> None:
    """Damage what the sink holds, and see that it shows."""
    with closing(connect(settings, SinkRole.OWNER)) as connection, connection, connection.cursor() as cursor:
        cursor.execute("UPDATE stock SET stock = stock + 1000 WHERE sink = 'dedup'")
        assert cursor.rowcount > 0
        cursor.execute("DELETE FROM processed_events WHERE sink = 'dedup'")
        assert cursor.rowcount > 0
    assert check.check(settings).sink("dedup").drift


def test_from_the_topic_beside_a_sink_and_a_service_that_go_on(chain: Settings, client: Client) -> None:
    with running(chain) as sink, moving(client) as movements:
        wait_applied(chain)
        spoil(chain)
        would = rebuild(chain, "--from", "topic", "--dry-run")
        assert (would.returncode, "nothing was changed" in would.stdout) == (0, True), would.stderr
        assert check.check(chain).sink("dedup").drift
        assert check.check(chain).sink("dedup.rebuild").drift == {}
        movements.wait_for_more()
        assert sink.is_running(), sink.tail()
        done = rebuild(chain, "--from", "topic", "--yes")
        assert done.returncode == 0, done.stderr
        assert "resuming an interrupted rebuild" in done.stdout
        movements.wait_for_more()
        movements.halt()
        report = check.check_settled(chain, TIMEOUT_S, needs=sink.require_running)
        assert "sink-superseded" in sink.tail(100)
        # It is idle now, and the next rebuild is noticed at its next event.
        done = rebuild(chain, "--from", "topic", "--yes")
        assert done.returncode == 0, done.stderr
        assert client.move(nth_key(0), 1).status_code == 201
        again = check.check_settled(chain, TIMEOUT_S, needs=sink.require_running)
    assert again.findings == []
    assert report.findings == []
    assert [one.name for one in report.sinks] == ["dedup"]


def test_from_the_source_beside_a_sink_and_a_service_that_go_on(chain: Settings, client: Client) -> None:
    with running(chain) as sink, moving(client) as movements:
        wait_applied(chain)
        spoil(chain)
        done = rebuild(chain, "--from", "source", "--yes")
        assert done.returncode == 0, done.stderr
        assert "keys differ, by" in done.stdout
        assert check.check(chain).sink("dedup").drift == {}, "also while events are in flight"
        movements.wait_for_more()
        movements.halt()
        report = check.check_settled(chain, TIMEOUT_S)
        assert sink.is_running(), sink.tail()
    assert report.findings == []


def wait_applied(settings: Settings, items: int = 6) -> None:
    """Wait until the sink knows so many items."""
    wait_for("the sink to apply", lambda: len(Database(settings).totals()) >= items, timeout_s=TIMEOUT_S)


def drop_first_four(topic: Settings) -> None:
    admin = AdminClient(client_config(topic))
    for future in admin.delete_records([TopicPartition(topic_of(topic), 0, 4)]).values():
        future.result(10)


def test_a_topic_that_has_dropped_events_is_refused_for_a_rebuild(topic: Settings) -> None:
    applied_until(topic, 1)
    drop_first_four(topic)

    refused = rebuild(topic, "--from", "topic", "--yes")
    assert refused.returncode == 1
    assert "partition 0 begins at offset 4 — `outbox rebuild dedup --from source`" in refused.stderr
    assert "there is no copy" in rebuild(topic, "--from", "topic", "--drop-copy").stdout

    would = rebuild(topic, "--from", "source", "--dry-run")
    assert (would.returncode, Database(topic).positions()[0]) == (0, 1), would.stderr
    done = rebuild(topic, "--from", "source", "--yes")
    assert f"partition {topic_of(topic)}/0: offsets 1 to 3 are skipped" in done.stdout, done.stderr
    assert Database(topic).positions()[0] == 4
