"""`outbox handle`: the project's handlers as a process, on a real topic."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from subprocess import CompletedProcess

import pytest
from psycopg2 import extensions

from outbox.base.database import query
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.handlers import Event as Handled
from outbox.handlers import handler
from outbox.sink import discovery
from outbox.sink.applying.handlers.handler import Handler
from outbox.sink.running import supervisor, watchdog
from outbox.sink.running.plain import plain_engine
from outbox_lab.stack.command import SinkProcess
from outbox_lab.testing.command import outbox
from outbox_lab.testing.failures import raises
from tests.support.made_events import Event
from tests.support.sink_driver import Database
from tests.support.sink_process import RANDOM, TIMEOUT_S, Publisher, logged, reported_failure
from tests.support.topic_reader import topic_of

HANDLER, PARALLEL = "item_receipts", "item_notices"
RECEIPTS = "SELECT event_id::text, key, version FROM handled_events WHERE handler = %s ORDER BY key, place"


def receipts(settings: Settings, name: str = HANDLER) -> list[tuple[str, str, int]]:
    rows = Database(settings).query(RECEIPTS, name)
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


def wait_handled(process: SinkProcess, settings: Settings, count: int, name: str = HANDLER) -> None:
    def handled() -> bool:
        assert process.is_running(), process.tail()
        return len(receipts(settings, name)) >= count

    wait_for(f"{count} events to be handled", handled, timeout_s=TIMEOUT_S)


def test_killed_with_eight_workers_while_calls_fail_it_handles_each_event_once_in_order(
    topic: Settings, publisher: Publisher
) -> None:
    sent: list[Event] = []
    change(
        topic,
        "ALTER TABLE handled_events ADD CONSTRAINT forbidden CHECK (version % 7 <> 3 OR key !~ '[123]$') NOT VALID",
    )
    for _ in range(5):
        some = publisher.events(200, keys=20)
        sent += some
        with handling(topic, PARALLEL) as process:
            for begin in range(0, 200, 20):
                publisher.send(some[begin : begin + 20])
            wait_handled(process, topic, len(receipts(topic, PARALLEL)) + RANDOM.randrange(1, 20), PARALLEL)
    database = Database(topic, PARALLEL)
    assert {"handler failed", "parked"} <= {*database.dead_letters().values()}
    change(topic, "ALTER TABLE handled_events DROP CONSTRAINT forbidden")
    with handling(topic, PARALLEL) as process:
        wait_handled(process, topic, len(sent), PARALLEL)
    found = receipts(topic, PARALLEL)
    assert len(found) == len(sent)
    assert {*found} == wanted(sent)
    assert found == sorted(found, key=lambda one: (one[1], one[2])), "in the order of each key"
    assert {*database.statuses().values()} == {"replayed"}


def handle_here(settings: Settings, of: Handler) -> None:
    """Run a handler in this process, to the end of what is there."""
    spec = discovery.resolve(settings, discovery.job_of(of))
    supervisor.run(settings, [spec], engine=plain_engine, until_caught_up=True)


def test_it_begins_with_the_oldest_event_or_with_what_comes_from_its_first_start_on(
    topic: Settings, publisher: Publisher
) -> None:
    found: dict[str, list[str]] = {"earliest": [], "latest": []}
    both = [
        handler("item", "order", name=begin, begin=begin)(partial(remember, found[begin]))
        for begin in ("earliest", "latest")
    ]
    some, more = publisher.events(6), publisher.events(6)
    events, later = ([one.event_id for one in of] for of in (some, more))
    for one in some:  # each in a transaction of its own
        publisher.send([one])
    for of in both:
        handle_here(topic, of)  # whose first start is behind these
    assert {name: {*of} for name, of in found.items()} == {"earliest": {*events}, "latest": set()}
    for one in more:
        publisher.send([one])
    for of in both:
        handle_here(topic, of)
    assert {name: {*of} for name, of in found.items()} == {"earliest": {*events, *later}, "latest": {*later}}

    items_topic = topic_of(topic)
    change(topic, f"DELETE FROM positions WHERE sink = 'latest' AND topic = '{items_topic}'")  # as if it was new
    change(topic, "DELETE FROM processed_events WHERE sink = 'latest'")
    handle_here(topic, both[1])
    assert sorted(found["latest"]) == sorted(later + events + later)


def remember(found: list[str], event: Handled, _: object) -> None:
    found.append(event.id)


def test_an_event_whose_call_does_not_return_is_set_aside_and_the_others_are_handled(
    topic: Settings, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{watchdog.__name__}.SILENCE_S", 1.0)
    some, may_end, found, hung = publisher.events(20, keys=4), threading.Event(), list[str](), list[str]()

    def hangs(event: Handled, connection: extensions.connection) -> None:
        if event.id == some[5].event_id:
            with connection.cursor() as cursor:
                cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 500")
            hung.append(event.id)
            may_end.wait()
        else:
            found.append(event.id)

    publisher.send(some)
    of = handler("item", name="hangs", attempts=1, workers=2)(hangs)
    try:
        for _ in range(4):
            with raises("database-connection-lost"):
                handle_here(topic, of)
        handle_here(topic, of)
    finally:
        may_end.set()
    assert len(hung) == 4, "twice in a batch, behind the first of its key, and as often as the handler says"
    letters = Database(topic, "hangs")
    opened = [identity for identity, status in letters.statuses().items() if status == "open"]
    assert {*opened} == {one.event_id for one in some[5::4]}
    assert {*found} == {one.event_id for one in some} - {*opened}


def change(settings: Settings, statement: str) -> None:
    """Change the sink database as its owner."""
    query(settings, SinkRole.OWNER, statement)


def test_a_handler_is_a_sink_for_every_command_and_runs_by_its_own(topic: Settings, publisher: Publisher) -> None:
    def run(*words: str) -> CompletedProcess[str]:
        return outbox(*words, home=topic.home, **topic.as_env())

    publisher.send(publisher.events(5))
    assert "run it by `outbox handle`" in reported_failure(run("sink", HANDLER, "--until-caught-up"))
    done = run("handle", HANDLER, "--until-caught-up")
    assert (done.returncode, len(receipts(topic))) == (0, 5), done.stderr
    assert logged(done, "applied")
    rewound = run("rewind", HANDLER, "--to-earliest", "--yes")
    assert rewound.returncode == 0, rewound.stderr
    again = run("handle", HANDLER, "--until-caught-up")
    assert (again.returncode, len(receipts(topic))) == (0, 5), "known events are not handled again"
