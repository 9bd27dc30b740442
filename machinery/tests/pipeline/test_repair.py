"""Rewind and rebuild on a real topic: where a sink begins again, what is refused, and no drift in the end.

That a rewound sink reads again is shown in test_sink_stream.py.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from subprocess import CompletedProcess

import pytest
from confluent_kafka import Producer

from outbox.audit import check
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.kafka.spec import TopicSpec
from outbox.sink.remembering import positions
from outbox.sink.remembering.positions import Beginning
from outbox.sink.repair import rewind
from outbox.sink.repair.rewind import Move, TopicPartition
from outbox_lab.testing.command import outbox
from outbox_lab.testing.failures import raises
from outbox_lab.testing.helpers import chosen_seed
from tests.stock import Client
from tests.support.made_events import nth_key, sums
from tests.support.sink_driver import Database, open_sink
from tests.support.sink_process import Publisher, applied_until, catch_up, logged, running_warm
from tests.support.topic_reader import delete_topics, drop_records, topic_of

TIMEOUT_S = 180


def repair(settings: Settings, command: str, *words: str) -> CompletedProcess[str]:
    """`outbox rewind` or `outbox rebuild` of the sink `dedup`."""
    done = outbox(command, "dedup", *words, home=settings.home, **settings.as_env())
    assert "Traceback" not in done.stderr
    return done


def beginning(settings: Settings) -> Beginning:
    with closing(connect(settings, SinkRole.WRITER)) as connection, connection.cursor() as cursor:
        return positions.beginning(cursor, "dedup")


class TestRewind:
    @pytest.fixture
    def applied(self, topic: Settings) -> Settings:
        """A topic with five records in partition 0, of which a sink, whose driver has ended, has applied four."""
        applied_until(topic, 4)
        return topic

    def test_a_moment_after_events_that_were_not_applied_skips_none(self, applied: Settings) -> None:
        moment, place = datetime.now(UTC), TopicPartition(topic_of(applied), 0)
        producer = Producer(client_config(applied))
        producer.produce(place.topic, "later", partition=0, headers={"id": "1"})
        producer.flush(30)
        assert topics.offsets_since(applied, place.topic, moment) == {0: 5}
        assert rewind.to_datetime(applied, "dedup", moment)[place] == Move(position=4, begin=4)

    def test_recreated_topic_needs_its_former_partitions(self, applied: Settings) -> None:
        name = topic_of(applied)
        for partitions in (1, 2):
            delete_topics(applied, name)
            topics.create(applied, [TopicSpec(name, partitions, {})])
            if partitions == 1:
                with raises("topic-partitions"):
                    rewind.accept_recreated(applied, "dedup")
                assert beginning(applied) == Beginning(0, {})
        assert rewind.accept_recreated(applied, "dedup") == [name]
        assert beginning(applied) == Beginning(1, {name: {0: 0, 1: 0}})

    def test_a_running_sink_is_not_rewound(self, applied: Settings) -> None:
        moves = rewind.to_earliest(applied, "dedup")
        with open_sink(applied), raises("sink-has-driver"):
            rewind.rewind(applied, "dedup", moves)
        assert beginning(applied) == Beginning(0, {})

    def test_a_sink_reads_from_a_moment_in_the_middle(self, topic: Settings) -> None:
        publisher = Publisher(topic)
        early, late = publisher.events(30), publisher.events(20)
        publisher.send(early)
        between = datetime.now(UTC)
        wait_for("the clock to go on", lambda: datetime.now(UTC) > between + timedelta(milliseconds=5), timeout_s=5)
        publisher.send(late)
        assert catch_up(topic).returncode == 0
        done = repair(topic, "rewind", "--yes", "--to-datetime", between.isoformat())
        assert done.returncode == 0, done.stderr
        done = catch_up(topic)
        assert done.returncode == 0, done.stderr
        lines = logged(done, "applied")
        assert (
            sum(int(str(line["rows"])) for line in lines) == sum(int(str(line["duplicates"])) for line in lines) == 20
        )
        assert Database(topic).totals() == sums([*early, *late])

    def test_what_the_topic_has_dropped_is_given_up_only_if_told_so(self, applied: Settings) -> None:
        drop_records(applied, topic_of(applied), 5)
        assert "would replay nothing" in repair(applied, "rewind", "--yes", "--to-earliest").stderr
        assert Database(applied).positions() == {0: 4, 1: 0}
        told = repair(applied, "rewind", "--yes", "--to-earliest", "--skip-dropped").stdout
        assert "/0: from offset 5, giving up 4 to 4" in told
        assert "begins there at its next start" in told
        assert Database(applied).positions() == {0: 5, 1: 0}
        assert catch_up(applied).returncode == 0

    def test_the_command_asks_and_says_where_the_sink_begins(self, applied: Settings) -> None:
        name = topic_of(applied)

        def run(*words: str) -> tuple[int, str, Beginning]:
            done = repair(applied, "rewind", *words)
            return done.returncode, done.stdout + done.stderr, beginning(applied)

        assert run("--accept-recreated", "--to-earliest")[0] == 2
        assert "no topic was created again" in run("--accept-recreated", "--yes")[1]
        status, told, begin = run("--to-earliest")
        assert (status, begin) == (130, Beginning(0, {})), "nobody has confirmed it"
        assert f"partition {name}/0: from offset 0, replaying 4" in told
        status, told, begin = run("--to-earliest", "--yes")
        assert (status, begin) == (0, Beginning(1, {name: {0: 0, 1: 0}}))
        assert "with checkpoint 1" in told
        status, _, begin = run("--to-positions", "--yes")
        assert (status, begin) == (0, Beginning(2, {name: {0: 4, 1: 0}}))
        assert Database(applied).positions() == {0: 4, 1: 0}, "what is applied stays applied"


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


def spoil(settings: Settings, items: int = 6) -> None:
    """Once the sink knows so many items, damage what it holds, and see that it shows."""
    wait_for("the sink to apply", lambda: len(Database(settings).totals()) >= items, timeout_s=TIMEOUT_S)
    with closing(connect(settings, SinkRole.OWNER)) as connection, connection, connection.cursor() as cursor:
        for statement in ("UPDATE stock SET stock = stock + 1000", "DELETE FROM processed_events"):
            cursor.execute(f"{statement} WHERE sink = 'dedup'")
            assert cursor.rowcount > 0
    assert check.check(settings).sink("dedup").drift


class TestRebuild:
    def test_from_the_topic_beside_a_sink_and_a_service_that_go_on(self, chain: Settings, client: Client) -> None:
        with running_warm(chain) as sink, moving(client) as movements:
            spoil(chain)
            would = repair(chain, "rebuild", "--from", "topic", "--dry-run")
            assert (would.returncode, "nothing was changed" in would.stdout) == (0, True), would.stderr
            assert check.check(chain).sink("dedup").drift
            assert check.check(chain).sink("dedup.rebuild").drift == {}
            movements.wait_for_more()
            assert sink.is_running(), sink.tail()
            done = repair(chain, "rebuild", "--from", "topic", "--yes")
            assert done.returncode == 0, done.stderr
            assert "resuming an interrupted rebuild" in done.stdout
            movements.wait_for_more()
            movements.halt()
            report = check.check_settled(chain, TIMEOUT_S, needs=sink.require_running)
            assert "sink-superseded" in sink.tail(100)
            # It is idle now, and the next rebuild is noticed at its next event.
            done = repair(chain, "rebuild", "--from", "topic", "--yes")
            assert done.returncode == 0, done.stderr
            assert client.move(nth_key(0), 1).status_code == 201
            again = check.check_settled(chain, TIMEOUT_S, needs=sink.require_running)
        assert again.findings == []
        assert report.findings == []
        assert [one.name for one in report.sinks] == ["dedup"]

    def test_from_the_source_beside_a_sink_and_a_service_that_go_on(self, chain: Settings, client: Client) -> None:
        with running_warm(chain) as sink, moving(client) as movements:
            spoil(chain)
            done = repair(chain, "rebuild", "--from", "source", "--yes")
            assert done.returncode == 0, done.stderr
            assert "keys differ, by" in done.stdout
            assert check.check(chain).sink("dedup").drift == {}, "also while events are in flight"
            movements.wait_for_more()
            movements.halt()
            report = check.check_settled(chain, TIMEOUT_S)
            assert sink.is_running(), sink.tail()
        assert report.findings == []

    def test_a_topic_that_has_dropped_events_is_refused(self, topic: Settings) -> None:
        applied_until(topic, 1)
        drop_records(topic, topic_of(topic), 4)
        refused = repair(topic, "rebuild", "--from", "topic", "--yes")
        assert refused.returncode == 1
        assert "partition 0 begins at offset 4 — `outbox rebuild dedup --from source`" in refused.stderr
        assert "there is no copy" in repair(topic, "rebuild", "--from", "topic", "--drop-copy").stdout

        would = repair(topic, "rebuild", "--from", "source", "--dry-run")
        assert (would.returncode, Database(topic).positions()[0]) == (0, 1), would.stderr
        done = repair(topic, "rebuild", "--from", "source", "--yes")
        assert f"partition {topic_of(topic)}/0: offsets 1 to 3 are skipped" in done.stdout, done.stderr
        assert Database(topic).positions()[0] == 4
