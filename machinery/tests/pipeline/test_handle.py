"""`outbox handle`: the project's handlers as a process, on a real topic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox_lab.stack.command import SinkProcess
from outbox_lab.testing.command import outbox
from tests.support.made_events import Event
from tests.support.sink_driver import Database
from tests.support.sink_process import RANDOM, TIMEOUT_S, Publisher, logged, reported_failure

HANDLER = "item_receipts"
RECEIPTS = "SELECT event_id::text, key, version FROM handled_events WHERE handler = %s ORDER BY key, place"


def receipts(settings: Settings) -> list[tuple[str, str, int]]:
    rows = Database(settings).query(RECEIPTS, HANDLER)
    return [(str(event_id), str(key), int(str(version))) for event_id, key, version in rows]


def wanted(events: list[Event]) -> set[tuple[str, str, int]]:
    return {(one.event_id, one.key, one.version) for one in events}


@contextmanager
def handling(settings: Settings, *names: str) -> Iterator[SinkProcess]:
    process = SinkProcess(f"handle-{settings.topic_prefix}", settings, ["handle", *names])
    process.start_timeout_s = TIMEOUT_S
    process.spawn()
    try:
        yield process
    finally:
        process.kill()


def wait_handled(process: SinkProcess, settings: Settings, count: int) -> None:
    def handled() -> bool:
        assert process.is_running(), process.tail()
        return len(receipts(settings)) >= count

    wait_for(f"{count} events to be handled", handled, timeout_s=TIMEOUT_S)


def test_killed_again_and_again_it_handles_each_event_once_in_order(topic: Settings, publisher: Publisher) -> None:
    sent: list[Event] = []
    for _ in range(5):
        with handling(topic, HANDLER) as process:
            some = publisher.events(200)
            sent += some
            for begin in range(0, 200, 20):
                publisher.send(some[begin : begin + 20])
            publisher.send(some[:10])
            wait_handled(process, topic, len(sent) - RANDOM.randrange(1, 200))
    done = outbox("handle", HANDLER, "--until-caught-up", home=topic.home, **topic.as_env())
    assert done.returncode == 0, done.stderr
    found = receipts(topic)
    assert len(found) == len(sent)
    assert {*found} == wanted(sent)
    assert found == sorted(found, key=lambda one: (one[1], one[2])), "in the order of each key"


def test_what_it_fails_for_is_tried_again_and_others_of_the_key_wait(topic: Settings, publisher: Publisher) -> None:
    some = publisher.events(20, keys=2)
    owner = Database(topic)
    forbid = "ALTER TABLE handled_events ADD CONSTRAINT forbidden CHECK (NOT (key = '{}' AND version = 2)) NOT VALID"
    with closing(connect(topic, SinkRole.OWNER)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(forbid.format(some[0].key))
    with handling(topic, HANDLER) as process:
        publisher.send(some)
        wait_handled(process, topic, 11)
        letters = Database(topic, HANDLER)
        reasons = [*letters.dead_letters().values()]
        assert sorted(reasons) == ["handler failed", *["parked"] * 8]
        with closing(connect(topic, SinkRole.OWNER)) as connection, connection, connection.cursor() as cursor:
            cursor.execute("ALTER TABLE handled_events DROP CONSTRAINT forbidden")
        wait_handled(process, topic, 20)
        assert {*letters.statuses().values()} == {"replayed"}
    found = [version for _, key, version in receipts(topic) if key == some[0].key]
    assert found == [*range(1, 11)]
    assert owner.dead_letters() == {}


def test_a_handler_is_a_sink_for_every_command_and_runs_by_its_own(topic: Settings, publisher: Publisher) -> None:
    publisher.send(publisher.events(5))
    as_sink = outbox("sink", HANDLER, "--until-caught-up", home=topic.home, **topic.as_env())
    assert "run it by `outbox handle`" in reported_failure(as_sink)
    done = outbox("handle", HANDLER, "--until-caught-up", home=topic.home, **topic.as_env())
    assert (done.returncode, len(receipts(topic))) == (0, 5), done.stderr
    assert logged(done, "applied")
    rebuilt = outbox("rebuild", HANDLER, "--from", "topic", "--yes", home=topic.home, **topic.as_env())
    assert rebuilt.returncode == 1
    assert "is a function" in rebuilt.stderr
    rewound = outbox("rewind", HANDLER, "--to-earliest", "--yes", home=topic.home, **topic.as_env())
    assert rewound.returncode == 0, rewound.stderr
    again = outbox("handle", HANDLER, "--until-caught-up", home=topic.home, **topic.as_env())
    assert (again.returncode, len(receipts(topic))) == (0, 5), "known events are not handled again"
