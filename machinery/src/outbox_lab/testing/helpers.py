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
from outbox_lab.testing.asgi import Application

if TYPE_CHECKING:
    from werkzeug.test import TestResponse

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
