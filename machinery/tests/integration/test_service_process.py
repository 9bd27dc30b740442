"""The service as a process: its database or itself stopped, killed or frozen under load; its log and its spans."""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
import requests
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Proto
from requests.exceptions import ChunkedEncodingError

from outbox.base import project, spans, trace
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.migrations.migrate import migrate
from outbox_lab.stack import ports
from outbox_lab.stack.command import Command, service
from outbox_lab.stack.ports import LOOPBACK
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.fixtures.stack import private_stack
from outbox_lab.testing.helpers import chosen_seed, query, seeded
from outbox_lab.testing.homes import Homes
from tests.stock import SERVICES, audit, move, project_of, serving
from tests.support.collector import Collector, Span, collecting

CLIENTS = 4
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PARENT = "00f067aa0ba902b7"
OF_WORKERS = 20  # movements, so that each of two workers makes some


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


def test_an_idle_service_outlives_a_restart_and_logs_trace_ids(private: Stack, served: Command) -> None:
    postgres, (traced, unsampled) = private.part("postgres"), (uuid.uuid4().hex, uuid.uuid4().hex)
    ready = f"{private.settings.service_url}/readyz"

    def ask(traceparent: str | None = None) -> int:
        return requests.get(ready, headers={"traceparent": traceparent}, timeout=60).status_code

    def ask_many() -> set[int]:
        # More requests than there are connections, so that each of these is used.
        with ThreadPoolExecutor(16) as pool:
            return set(pool.map(lambda _: ask(), range(64)))

    assert ask_many() == {200}
    # The last line of a process that was killed may be a half.
    before = len(served.log_file.read_text().splitlines())
    assert ask(f"00-{traced}-{PARENT}-01") == 200
    postgres.stop()
    try:
        assert ask(f"00-{unsampled}-{PARENT}-00") == 503
        assert [ask() for _ in range(32)] == [503] * 32, "more than there are threads"
    finally:
        postgres.start()
    assert ask_many() == {200}
    lines = [json.loads(line) for line in served.log_file.read_text().splitlines()[before:]]
    assert [(line["event"], line.get("trace_id")) for line in lines] == [
        ("request completed", traced),
        ("database unavailable", unsampled),
        *[("database unavailable", None)] * 32,
    ]


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


def counted(settings: Settings) -> float:
    """Completed requests for a movement that all workers have counted."""
    told = requests.get(f"{settings.service_url}/metrics", timeout=10).text
    labels = 'http_request_duration_seconds_count{method="POST",route="/movements",status="201"}'
    return sum(float(line.rpartition(" ")[2]) for line in told.splitlines() if line.startswith(labels))


# Spans -------------------------------------------------------------------------------------------------------------


def status(settings: Settings, **request: Any) -> int:
    """The status of the response to a movement."""
    return move(settings, **request).status_code


def written(settings: Settings) -> list[str | None]:
    """The traceparents of all events."""
    return [traceparent for (traceparent,) in query(settings, "SELECT traceparent FROM outbox ORDER BY id")]


def of_trace(collector: Collector, trace_id: str) -> list[Span]:
    """The spans of a trace, the request before its append."""
    return sorted((span for span in collector.spans if span.trace_id == trace_id), key=lambda span: span.kind)


@pytest.mark.parametrize("kind", SERVICES)
def test_one_trace_leads_from_the_request_to_its_event(
    apart: Settings, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = apart.replace(service_workers=2)  # each exports its own spans
    monkeypatch.setenv(project.VARIABLE, str(project_of(SERVICES[kind], tmp_path)))
    sampled, unsampled, refused, failed = (uuid.uuid4().hex for _ in range(4))
    before = len(written(settings))
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        with serving(settings) as process:
            started = len(process.log_file.read_text())
            assert status(settings, traceparent=f"00-{sampled}-{PARENT}-01") == 201
            assert status(settings, traceparent=f"00-{unsampled}-{PARENT}-00") == 201
            assert status(settings) == 201
            assert status(settings, quantity=0, traceparent=f"00-{refused}-{PARENT}-01") == 422
            log = process.log_file.read_text()[started:]
            assert [status(settings) for _ in range(OF_WORKERS)] == [201] * OF_WORKERS
            query(settings, "ALTER TABLE outbox RENAME TO outbox_away")
            try:
                assert status(settings, traceparent=f"00-{failed}-{PARENT}-01") == 500
            finally:
                query(settings, "ALTER TABLE outbox_away RENAME TO outbox")
        # A span waits up to 5 s for others: the last ones came when the worker ended.
        assert collector.paths == {"/v1/traces"}
        request, append = of_trace(collector, sampled)
        assert (request.name, request.kind, request.parent) == ("POST /movements", Proto.SPAN_KIND_SERVER, PARENT)
        assert (request.attributes["http.route"], request.attributes["http.response.status_code"]) == (
            "/movements",
            201,
        )
        assert request.service == f"{settings.topic_prefix}-service"
        topic = f"{settings.topic_prefix}.item"
        assert (append.name, append.kind, append.parent) == (f"append {topic}", Proto.SPAN_KIND_PRODUCER, request.id)
        assert append.attributes["messaging.destination.name"] == topic
        of_sampled, of_unsampled, of_none, *_ = written(settings)[before:]
        assert of_sampled is not None
        assert of_sampled[:-3] == append.place
        assert trace.is_sampled(of_sampled)
        assert trace.trace_id(of_unsampled) == unsampled
        assert not trace.is_sampled(of_unsampled)
        assert of_trace(collector, unsampled) == []
        begun, own = of_trace(collector, str(trace.trace_id(of_none)))
        assert (begun.parent, own.parent) == ("", begun.id), "a request without one begins a trace"
        (rejected,) = of_trace(collector, refused)
        assert (rejected.attributes["http.response.status_code"], rejected.failed) == (422, False)
        request, append = of_trace(collector, failed)
        assert (request.failed, request.attributes["error.type"]) == (True, "500")
        assert (append.failed, append.attributes["error.type"]) == (True, "ProgrammingError")
        sent = Counter(span.name for span in collector.spans)
        assert sent == {"POST /movements": OF_WORKERS + 4, f"append {topic}": OF_WORKERS + 3}, (
            "of all workers, none of probes"
        )
    assert sampled in log
    assert "Traceback" not in log


def test_a_collector_that_never_answers_holds_nothing_up(apart: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = apart.replace(service_workers=1)
    before = len(written(settings))
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{deaf.getsockname()[1]}")
        with serving(settings) as process:
            for _ in range(30):
                began = time.monotonic()
                assert status(settings) == 201
                assert time.monotonic() - began < 5
            began = time.monotonic()
            process.stop()
            assert time.monotonic() - began < spans.FLUSH_TIMEOUT_S + 5, "the SDK alone would wait for 30 s"
    assert len(written(settings)) == before + 30
