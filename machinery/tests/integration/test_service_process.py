"""The service as a process, under load, while its database or itself is stopped, killed or frozen."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from random import Random

import pytest
import requests
from requests.exceptions import ChunkedEncodingError

from outbox.base import project
from outbox.base.settings import Settings, address
from outbox.base.wait import wait_for
from outbox.migrations.migrate import migrate
from outbox_lab.stack import ports
from outbox_lab.stack.command import Command, service
from outbox_lab.stack.ports import LOOPBACK
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.command import outbox
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.stack import private_stack
from outbox_lab.testing.helpers import chosen_seed, query, seeded
from outbox_lab.testing.homes import Homes
from tests.stock import audit
from tests.support.services import SERVICES, project_of

CLIENTS = 4


@pytest.fixture(scope="module")
def private(homes: Homes) -> Iterator[Stack]:
    """A Postgres that nobody else uses, migrated."""
    stack = private_stack(homes.new("service"))
    stack.up(only=["postgres"])
    try:
        migrate(stack.settings)
        yield stack
    finally:
        stack.down()


@pytest.fixture(scope="module", params=[*SERVICES.values()], ids=[*SERVICES])
def served(
    private: Stack, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Command]:
    """The service of each framework, running on it."""
    root = project_of(request.param, tmp_path_factory.mktemp("service"))
    process = service(private.settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(project.VARIABLE, str(root))
        process.start()
        try:
            yield process
        finally:
            process.stop()


@pytest.fixture
def apart(private: Stack, tmp_path: Path) -> Settings:
    """Settings of a service on the same database that runs beside the others."""
    return private.settings.replace(home=tmp_path / "home", service_bind=f"{LOOPBACK}:{ports.choose(0)[0]}")


class Work:
    """Clients that make movements without a pause, each until it has an answer: with the same key."""

    def __init__(self, settings: Settings, items: list[str]) -> None:
        self._url = f"{settings.service_url}/movements"
        self._headers = {"Authorization": f"Bearer {settings.service_token.get_secret_value()}"}
        self._items = items
        self._lock = threading.Lock()
        self.halt = threading.Event()
        self.answered: Counter[int] = Counter()  # requests by status; 0 is a broken connection
        self.made: list[str] = []  # movements that were confirmed
        self.repeated = 0  # answers that an earlier request of the same key was to get
        self.slowest_s = 0.0

    def client(self, random: Random) -> None:
        """One client. It ends once the movement under way is answered."""
        with requests.Session() as http:
            http.headers.update(self._headers)
            while not self.halt.is_set():
                quantity = random.choice([-1, 1]) * random.randint(1, 100)
                body = {"item_id": random.choice(self._items), "quantity": quantity, "unit": "KGM"}
                key = str(uuid.UUID(int=random.getrandbits(128)))
                # Without a connection at the end, the test has failed while the service was away.
                while (status := self._ask(http, key, body)) == 503 or (status == 0 and not self.halt.is_set()):
                    pass

    def _ask(self, http: requests.Session, key: str, body: dict[str, object]) -> int:
        asked_at, started_at_s, made = datetime.now(UTC), time.monotonic(), None
        try:
            response = http.post(self._url, json=body, headers={"Idempotency-Key": key}, timeout=60)
            status = response.status_code
            made = response.json() if status == 201 else None
        except (requests.ConnectionError, ChunkedEncodingError):  # the latter in the middle of an answer
            status = 0
            self.halt.wait(0.01)
        with self._lock:
            self.slowest_s = max(self.slowest_s, time.monotonic() - started_at_s)
            self.answered[status] += 1
            if made is not None:
                self.made.append(made["id"])
                self.repeated += datetime.fromisoformat(made["occurred_at"]) < asked_at
        return status

    def wait_for_more(self, status: int, count: int = 20) -> None:
        """Wait until so many more requests have been answered so."""
        before = self.answered[status]
        wait_for(f"{count} more answers {status}", lambda: self.answered[status] >= before + count, timeout_s=60)


@contextmanager
def working(settings: Settings) -> Iterator[Work]:
    """Clients at work among a few items; at the end each has the answer to what it has asked."""
    seed = chosen_seed()
    rows = "INSERT INTO items SELECT uuidv7(), 'KGM', 0, 0 FROM generate_series(1, 6) RETURNING id"
    work = Work(settings, [str(item) for (item,) in query(settings, rows)])
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(work.client, seeded(seed, number)) for number in range(CLIENTS)]
        try:
            yield work
        finally:
            work.halt.set()
    for client in clients:
        client.result()


def assert_sound(settings: Settings, work: Work) -> None:
    """Nothing half-done, nothing unexpected, and every confirmed movement there, once."""
    assert set(work.answered) <= {0, 201, 503}, work.answered
    assert len(work.made) == len(set(work.made)) == work.answered[201], "a confirmed movement was confirmed to another"
    made = query(
        settings, "SELECT count(*) FROM outbox WHERE payload ->> 'movement_id' = ANY (%s)", parameters=[work.made]
    )
    assert made == [(len(work.made),)], "a confirmed movement is not there"
    assert audit(settings) == {}


@pytest.mark.parametrize("crash", [False, True], ids=["restarted", "killed"])
def test_a_database_that_ends_under_load_gives_503_until_it_is_back(
    private: Stack, served: Command, crash: bool
) -> None:
    settings, postgres, pid = private.settings, private.part("postgres"), served.pid()
    with working(settings) as work:
        work.wait_for_more(201)
        before = work.answered[503]
        postgres.kill() if crash else postgres.stop()
        work.wait_for_more(503)
        assert not served.is_ready(), "/readyz says ready without a database"
        postgres.start()
        work.wait_for_more(201, 100)
        assert served.is_ready()
    assert before == 0
    assert work.answered[0] == 0, "a request was left without an answer"
    assert served.pid() == pid
    assert_sound(settings, work)


def test_an_idle_service_outlives_a_restart_of_its_database(private: Stack, served: Command) -> None:
    settings, postgres = private.settings, private.part("postgres")
    ready = f"{settings.service_url}/readyz"

    def ask() -> set[int]:
        # More requests than there are connections, so that each of these is used.
        with ThreadPoolExecutor(16) as pool:
            return set(pool.map(lambda _: requests.get(ready, timeout=30).status_code, range(64)))

    assert ask() == {200}
    postgres.stop()
    postgres.start()
    assert ask() == {200}


def test_a_frozen_database_gives_503_in_bounded_time(private: Stack, served: Command) -> None:
    settings, postgres = private.settings, private.part("postgres")
    with working(settings) as work:
        work.wait_for_more(201)
        postgres.pause()
        try:
            work.wait_for_more(503, CLIENTS)
        finally:
            postgres.resume()
        work.wait_for_more(201, 100)
    assert work.answered[0] == 0, "a request was left without an answer"
    assert work.slowest_s < 20, work.slowest_s
    assert_sound(settings, work)


def test_a_service_that_is_asked_to_stop_answers_what_has_come_in(private: Stack, served: Command) -> None:
    settings = private.settings
    with working(settings) as work:
        work.wait_for_more(201)
        served.stop()
        assert "Shutting down: Master" in served.tail(), served.tail()
        served.start()
        work.wait_for_more(201, 100)
    assert work.repeated == 0, "a request was cut off after its commit"
    assert_sound(settings, work)


def test_a_service_that_is_killed_leaves_nothing_half_done(private: Stack, served: Command) -> None:
    settings = private.settings
    with working(settings) as work:
        for _ in range(3):
            work.wait_for_more(201)
            served.kill()
            served.start()
        work.wait_for_more(201)
    assert work.answered[0] > 0, "no request was under way when it was killed"
    assert_sound(settings, work)


def test_metrics_add_up_over_all_workers(private: Stack, served: Command) -> None:
    settings = private.settings
    before = counted(settings)
    with working(settings) as work:
        work.wait_for_more(201, 50)
    assert counted(settings) - before == work.answered[201]


def test_a_service_without_a_token_ends_with_one_line(tmp_path: Path) -> None:
    done = outbox("serve", home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("outbox: OUTBOX_SERVICE_TOKEN is not set"), line


def test_its_log_is_json_from_the_first_line_to_the_last(apart: Settings) -> None:
    process = service(apart)
    process.start()
    process.stop()
    told = [json.loads(line)["event"] for line in process.log_file.read_text().splitlines()]
    assert told[0].startswith("Starting gunicorn")
    assert told[-1].startswith("Shutting down")


def test_its_counts_are_removed_with_it(apart: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = tmp_path / "counts"
    counts.mkdir()
    monkeypatch.setenv("TMPDIR", str(counts))
    process = service(apart)
    process.start()
    try:
        (counted,) = counts.iterdir()
        assert list(counted.glob("*.db"))
    finally:
        process.stop()
    assert not counted.exists()


def test_each_line_of_a_traced_request_carries_its_id(private: Stack, served: Command) -> None:
    settings, (traced, unsampled) = private.settings, (uuid.uuid4().hex, uuid.uuid4().hex)
    ready = f"{settings.service_url}/readyz"

    def ask(traceparent: str | None) -> int:
        return requests.get(ready, headers={"traceparent": traceparent}, timeout=60).status_code

    before = len(served.log_file.read_text().splitlines())
    assert ask(f"00-{traced}-00f067aa0ba902b7-01") == 200
    private.part("postgres").stop()
    try:
        assert ask(f"00-{unsampled}-00f067aa0ba902b7-00") == 503
        assert [ask(None) for _ in range(32)] == [503] * 32, "more than there are threads"
    finally:
        private.part("postgres").start()
    told = [(line["event"], line.get("trace_id")) for line in lines(served, before)]
    assert told == [
        ("request completed", traced),
        ("database unavailable", unsampled),
        *[("database unavailable", None)] * 32,
    ]


def lines(process: Command, before: int) -> list[dict[str, object]]:
    """The log, without so many lines at its begin: the last line of a killed process may be a half."""
    return [json.loads(line) for line in process.log_file.read_text().splitlines()[before:]]


def counted(settings: Settings) -> float:
    """Completed requests for a movement that all workers have counted."""
    told = requests.get(f"{settings.service_url}/metrics", timeout=10).text
    labels = 'http_request_duration_seconds_count{method="POST",route="/movements",status="201"}'
    return sum(float(line.rpartition(" ")[2]) for line in told.splitlines() if line.startswith(labels))


class Answering(BaseHTTPRequestHandler):
    """Another program, which says that all is well whatever it is asked."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def test_another_program_on_its_port_is_not_seen_as_the_service(apart: Settings) -> None:
    process = service(apart)
    with HTTPServer(address(apart.service_bind), Answering) as other:
        threading.Thread(target=other.serve_forever, name="other", daemon=True).start()
        try:
            with raises("port-taken", "service"):
                process.start()
            process.prepare = lambda: None  # type: ignore[method-assign]  # it takes the port a moment later
            with raises("process-ended", "Connection in use"):
                process.start()
        finally:
            other.shutdown()
            process.stop()
