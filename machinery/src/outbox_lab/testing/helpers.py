"""Small helpers of tests: statements, random choices, clients of the service, events."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from outbox.base import database
from outbox.base.settings import Role, Settings, SourceRole
from outbox.events import catalog
from outbox.writing.event import Event, rows

if TYPE_CHECKING:
    from werkzeug.test import TestResponse
import asyncio
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus

from gunicorn.asgi.lifespan import LifespanManager  # type: ignore[import-untyped]

from outbox.base.wait import timeout_scale
from outbox.http.worker import is_asgi

T = TypeVar("T")


def query(
    settings: Settings, sql: str, role: Role = SourceRole.OWNER, parameters: object = None
) -> list[tuple[Any, ...]]:
    """Run one statement as a role, commit, and return its rows if it has any."""
    return database.query(settings, role, sql, parameters)


def chosen_seed() -> int:
    """A seed for the random choices of a test, printed so that a failure can be repeated."""
    seed = random.randrange(10**6)  # noqa: S311
    print(f"seed: {seed}")  # noqa: T201
    return seed


def seeded(seed: int, number: int) -> random.Random:
    """The random choices of one of several clients."""
    return random.Random(f"{seed}/{number}")  # noqa: S311


def all_at_once(count: int, work: Callable[[int], T]) -> list[T]:
    """Call ``work`` in so many threads, which start at the same moment."""
    barrier = threading.Barrier(count)

    def start(number: int) -> T:
        barrier.wait(30)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))


class ServiceClient:
    """Sends requests with the token. One for each thread."""

    def __init__(self, app: Application, settings: Settings) -> None:
        """``app`` is WSGI: Flask, or what the fixture `app` and `as_wsgi` make of FastAPI."""
        from werkzeug.test import Client

        self._http = Client(app)
        self._authorization = {"Authorization": f"Bearer {settings.service_token.get_secret_value()}"}

    def post(self, path: str, body: object = None, **headers: str) -> TestResponse:
        """POST a body as JSON, or nothing. Headers are given by name, a dash as an underscore."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self._http.post(path, json=body, headers={**self._authorization, **named})

    def get(self, path: str) -> TestResponse:
        """GET a path."""
        return self._http.get(path, headers=self._authorization)


def check_events(*events: Event) -> None:
    """Raises Failure for the first event that `append` would refuse, with the same code. It needs no database."""
    rows(events)


def outbox_records(settings: Settings) -> list[dict[str, Any]]:
    """The events in the outbox table, the oldest first, as a record of the topic would carry them."""
    topics = {name: aggregate.topic for name, aggregate in catalog.of_project(settings).aggregates.items()}
    found = query(
        settings,
        "SELECT id::text, aggregatetype, aggregateid, type, schema_version, payload, traceparent"
        " FROM public.outbox ORDER BY id",
    )
    return [
        {
            "topic": topics[aggregate],
            "key": key,
            "headers": {"id": id_, "eventType": type_, "schemaVersion": str(version), "traceparent": traceparent},
            "value": payload,
        }
        for id_, aggregate, key, type_, version, payload, traceparent in found
    ]


ANSWER_TIMEOUT_S = 60

Application = Callable[..., Any]
"""A Flask or a FastAPI application, or any other WSGI or ASGI one."""


@contextmanager
def as_wsgi(app: Application) -> Iterator[Application]:
    """The application as WSGI, until the end of the block. ASGI's runs on one loop, in a thread, within its lifespan.

    So one client, werkzeug's, speaks to both, and an asyncio engine belongs to one loop, however many threads ask.
    """
    if not is_asgi(app):
        yield app
        return
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        thread = threading.Thread(target=loop.run_forever, name="asgi", daemon=True)
        thread.start()
        lifespan = LifespanManager(app, logging.getLogger(__name__))
        try:
            _run(loop, lifespan.startup())
            yield partial(_respond, app, loop)
            _run(loop, lifespan.shutdown())
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


def _run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, loop).result(ANSWER_TIMEOUT_S * timeout_scale())


def _respond(
    app: Application, loop: asyncio.AbstractEventLoop, environ: dict[str, Any], start_response: Callable[..., object]
) -> list[bytes]:
    """One request and its whole response, as a WSGI application gives it."""
    sent: list[dict[str, Any]] = []
    waiting = [{"type": "http.request", "body": environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))}]

    async def receive() -> dict[str, Any]:
        return waiting.pop() if waiting else await loop.create_future()  # the client stays

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    _run(loop, app(_scope(environ), receive, send))
    start, *rest = sent
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]]
    start_response(f"{start['status']} {HTTPStatus(start['status']).phrase}", headers)
    return [message["body"] for message in rest]


def _scope(environ: dict[str, Any]) -> dict[str, Any]:
    named = {name.removeprefix("HTTP_"): value for name, value in environ.items() if name.startswith("HTTP_")}
    named |= {name: environ[name] for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)}
    path = environ["PATH_INFO"].encode("latin-1")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": environ["REQUEST_METHOD"],
        "scheme": environ["wsgi.url_scheme"],
        "path": path.decode(errors="replace"),
        "raw_path": path,
        "root_path": "",
        "query_string": environ.get("QUERY_STRING", "").encode("latin-1"),
        "headers": [
            (name.lower().replace("_", "-").encode(), value.encode("latin-1")) for name, value in named.items()
        ],
        "server": (environ["SERVER_NAME"], int(environ["SERVER_PORT"])),
    }
