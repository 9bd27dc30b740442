"""Every strategy through the stream at once, on one topic where what they promise to survive really happens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable

import psutil
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from outbox.audit import check
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.relay import lifecycle
from outbox_lab.stack.command import sink
from outbox_lab.testing.helpers import chosen_seed, seeded
from tests.stock import Client
from tests.support.deliveries import SURVIVES_RE_SENDS
from tests.support.made_events import STRATEGIES, nth_key, sums
from tests.support.sink_driver import Database
from tests.support.sink_process import (
    TIMEOUT_S,
    Publisher,
    catch_up,
    checkpoint,
    kill_between_commits,
    logged,
    newest,
    running_warm,
    wait_caught_up,
)
from tests.support.topic_reader import Record, duplicates, read, relayed, topic_of

ALL = sorted(STRATEGIES)


def quantities(records: Iterable[Record]) -> Counter[str]:
    """By item, what these records add up to."""
    totals: Counter[str] = Counter()
    for record in records:
        totals[record.key] += json.loads(record.value)["quantity"]
    return totals


def in_batch(settings: Settings, name: str, batch: int, records: Iterable[Record]) -> list[Record]:
    """The records of a planned batch."""
    ends = []
    for number in (batch - 1, batch):  # the last line of a plan has the offsets where it ends, by topic and partition
        plan = checkpoint(settings, name) / "offsets" / str(number)
        (partitions,) = json.loads(plan.read_text().splitlines()[-1]).values()
        ends.append({int(partition): offset for partition, offset in partitions.items()})
    first, last = ends
    return [one for one in records if first.get(one.partition, 0) <= one.offset < last.get(one.partition, 0)]


def test_each_strategy_drifts_by_just_what_it_does_not_survive(chain: Settings, client: Client) -> None:
    random = seeded(chosen_seed(), 0)
    items = [nth_key(number) for number in range(4)]

    def move(count: int) -> None:
        for _ in range(count):
            assert client.move(random.choice(items), random.randint(1, 10**6)).status_code == 201

    move(60)
    relayed(chain)
    sinks = sink(chain, *ALL)
    sinks.start_timeout_s = TIMEOUT_S
    try:
        sinks.start()
        wait_caught_up(sinks, chain, ALL)
        lifecycle.remove(chain, drop_slot=True)
        lifecycle.apply(chain)  # a new snapshot: the whole outbox is sent again
        wait_for("the events to be sent again", lambda: duplicates(read(chain)) == 60, timeout_s=TIMEOUT_S)
        wait_caught_up(sinks, chain, ALL)
        killed_in = kill_between_commits(sinks, chain, ALL, lambda: move(40))
    finally:
        sinks.kill()
    records = relayed(chain)
    done = catch_up(chain, *ALL)
    assert done.returncode == 0, done.stderr
    first = {str(line["sink"]): line["batch"] for line in reversed(logged(done, "applied"))}
    assert first == killed_in, "Spark delivered each batch again"

    assert (len(records), duplicates(records)) == (160, 60)
    times = Counter(record.id for record in records)
    by_re_sends = quantities({record.id: record for record in records if times[record.id] > 1}.values())
    by_re_reads = quantities(in_batch(chain, "naive", killed_in["naive"], records))
    assert any(by_re_sends.values())
    assert any(by_re_reads.values())
    report = check.check(chain)
    assert report.settled
    for name in ALL:
        due: Counter[str] = Counter()
        if name not in SURVIVES_RE_SENDS:
            due.update(by_re_sends)
        if name == "naive":
            due.update(by_re_reads)
        assert report.sink(name).drift == {key: quantity for key, quantity in due.items() if quantity}, name


def test_partitions_added_while_sinks_run_are_read_whole(topic: Settings) -> None:
    before = Publisher(topic)
    some = before.events(60, keys=40)
    before.send(some)
    with running_warm(topic, *ALL) as sinks:
        wait_caught_up(sinks, topic, ALL)
        admin = AdminClient(client_config(topic))
        admin.create_partitions([NewPartitions(topic_of(topic), 7)])[topic_of(topic)].result(10)
        wait_for(
            "brokers to know the partitions",
            lambda: topics.describe(topic, topic_of(topic)).partitions == 7,
            timeout_s=30,
        )
        after = Publisher(topic, continued=before)  # one that knows of the new partitions
        more = after.events(120, keys=40)
        after.send(more)
        assert all(topics.last_stable_offsets(topic, topic_of(topic)).get(partition, 0) for partition in (4, 5, 6))
        wait_caught_up(sinks, topic, ALL)
        for name in ALL:
            assert Database(topic, name).totals() == sums([*some, *more]), name
        processes = sinks.processes()
        processes[0].terminate()  # in good order, or naive would be right to read again
        assert psutil.wait_procs(processes, timeout=60)[1] == []
    last = after.events(60, keys=40)
    after.send(last)
    done = catch_up(topic, *ALL)
    assert done.returncode == 0, done.stderr
    for name in ALL:
        assert Database(topic, name).totals() == sums([*some, *more, *last]), name
        assert set(Database(topic, name).positions()) == set(range(7))


def test_a_batch_id_that_comes_again_with_other_rows(topic: Settings) -> None:
    """The host died before its disk had the newest log files, and events have come since: a larger batch, one id."""
    publisher = Publisher(topic)
    some = publisher.events(90)
    for part in (some[:30], some[30:60]):
        publisher.send(part)
        done = catch_up(topic, *ALL)
        assert done.returncode == 0, done.stderr
    batches = {name: newest(topic, name, "commits") for name in ALL}
    for name, batch in batches.items():
        for log in ("offsets", "commits"):
            (checkpoint(topic, name) / log / str(batch)).unlink()
    publisher.send(some[60:])
    done = catch_up(topic, *ALL)
    assert done.returncode == 0, done.stderr
    again = [(line["sink"], line["batch"], line["rows"]) for line in logged(done, "applied")]
    assert sorted(again) == sorted((name, batch, 60) for name, batch in batches.items()), "30 more under its id"
    for name in ALL:
        due = [*some, *some[30:60]] if name == "naive" else some
        assert Database(topic, name).totals() == sums(due), name
