"""`Service.answer`, of Flask and of FastAPI: one transaction for a change, and its answer under the request's key."""

from __future__ import annotations

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Protocol, cast

import fastapi
import flask
import pytest
from fastapi import APIRouter
from flask import request
from pydantic import BaseModel, ConfigDict
from sqlalchemy import text
from werkzeug.test import Client

from outbox.base.settings import Settings
from outbox.http import asgi, wsgi
from outbox.http.change import WriteHeaders
from outbox.http.idempotency import Answer, KeyReused
from outbox.http.problems import Kind
from outbox.writing.event import Event
from outbox_lab.testing.asgi import Application, as_wsgi
from outbox_lab.testing.helpers import query
from tests.support.made_events import nth_key
from tests.transactions import new_item

INSERT = text("INSERT INTO items (id, unit, stock, version) VALUES (:id, 'KGM', 0, 0)")
ITEM = nth_key(1)
HEADERS = ("Idempotency-Key", "traceparent")


class Refusal(Exception):
    """A refusal."""


class SoldOut(Refusal):
    """A more special one."""


class Wanted(BaseModel):
    """A request."""

    model_config = ConfigDict(extra="allow")

    item: str = ITEM


class Made(BaseModel):
    """An answer."""

    id: str


class Measured(BaseModel):
    """An answer of any value."""

    value: Any


REFUSALS: dict[type[Exception], Kind] = {
    Refusal: Kind(HTTPStatus.CONFLICT, "/problems/refused", "Refused"),
    SoldOut: Kind(HTTPStatus.GONE, "/problems/sold-out", "Sold out"),
}


class Change(Protocol):
    """A change in either framework: each test writes one coroutine for both."""

    def claim(self, made: BaseModel) -> Awaitable[bool]: ...

    def append(self, *events: Event) -> Awaitable[None]: ...

    def insert(self, item: str) -> Awaitable[None]: ...


Work = Callable[[Change, Wanted], Coroutine[Any, Any, None]]


class FlaskChange:
    """A change of Flask, whose methods can be awaited."""

    def __init__(self, change: wsgi.Change) -> None:
        self._change = change

    async def claim(self, made: BaseModel) -> bool:
        return self._change.claim(made)

    async def append(self, *events: Event) -> None:
        self._change.append(*events)

    async def insert(self, item: str) -> None:
        self._change.connection.execute(INSERT, {"id": item})


class FastapiChange:
    """A change of FastAPI."""

    def __init__(self, change: asgi.Change) -> None:
        self._awaited = change

    async def claim(self, made: BaseModel) -> bool:
        return await self._awaited.claim(made)

    async def append(self, *events: Event) -> None:
        await self._awaited.append(*events)

    async def insert(self, item: str) -> None:
        self._awaited.session.add(new_item(uuid.UUID(item)))


class Service(ABC):
    """A service in one framework. Each request makes the change that the test asks for."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.work: Work = insert
        self.found: list[Answer | Exception] = []

    @abstractmethod
    def app(self) -> Application:
        """The application, which has the routes /items and /OWNER/items."""

    def ask(
        self,
        work: Work,
        *,
        key: str = "k",
        traceparent: str | None = None,
        path: str = "/items",
        sent: str | None = None,
    ) -> Answer:
        """The answer to a request whose body is an item, or ``sent``. Raises what the service has raised."""
        self.work = work
        headers = {"Idempotency-Key": key, "traceparent": traceparent}
        headers["Authorization"] = f"Bearer {self.settings.service_token.get_secret_value()}"
        given = {name: value for name, value in headers.items() if value}
        body = json.dumps({"item": ITEM}) if sent is None else sent
        with as_wsgi(self.app()) as app:
            response = Client(app).post(path, data=body, content_type="application/json", headers=given)
        assert self.found, response.text
        found = self.found.pop()
        if isinstance(found, Exception):
            raise found
        assert (response.status_code, response.text) == (found.status, found.body)
        return Answer(found.status, found.body, found.is_repeated)


class Flask(Service):
    """In Flask."""

    def app(self) -> Application:
        service = wsgi.Service("Items", self.settings, REFUSALS)
        app = service.app()

        def finish(change: wsgi.Change, wanted: Wanted) -> None:
            with suppress(StopIteration):  # nothing in it waits
                self.work(FlaskChange(change), wanted).send(None)

        def answer(owner: str = "", body: object = None) -> flask.Response:
            header = WriteHeaders.model_validate({name: request.headers.get(name) for name in HEADERS})
            try:
                self.found.append(service.answer(header, Wanted(), finish))
            except Exception as error:
                self.found.append(error)
                raise
            return cast("wsgi.Answer", self.found[-1]).response()

        for rule in ("/items", "/<owner>/items"):
            app.add_url_rule(rule, view_func=answer, methods=["POST"], endpoint=rule)
        return app


class Fastapi(Service):
    """In FastAPI."""

    def app(self) -> Application:
        service = asgi.Service("Items", self.settings, REFUSALS)
        api = APIRouter()

        async def finish(change: asgi.Change, wanted: Wanted) -> None:
            await self.work(FastapiChange(change), wanted)

        @api.post("/items")
        @api.post("/{owner}/items")
        async def answer(header: asgi.WriteHeaders, body: Wanted) -> fastapi.Response:
            try:
                self.found.append(await service.answer(header, Wanted(), finish))
            except Exception as error:
                self.found.append(error)
                raise
            return cast("asgi.Answer", self.found[-1]).response()

        return service.app(api)


@pytest.fixture(params=[Flask, Fastapi])
def service(request: pytest.FixtureRequest, databases: Settings) -> Service:
    made: Service = request.param(databases)
    return made


async def insert(change: Change, wanted: Wanted) -> None:
    if await change.claim(Made(id=wanted.item)):
        await change.insert(wanted.item)


def items(settings: Settings) -> list[str]:
    return [str(item) for (item,) in query(settings, "SELECT id FROM items")]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"path": "/alice/items"}, {"path": "/bob/items"}),
        ({"path": "/items?as=alice"}, {"path": "/items?as=bob"}),
        ({"sent": '{"secret": "a"}'}, {"sent": '{"secret": "b"}'}),
    ],
)
def test_a_key_is_of_one_request_whatever_the_service_takes_of_it(
    service: Service, first: dict[str, str], second: dict[str, str]
) -> None:
    service.ask(insert, **first)
    with pytest.raises(KeyReused):
        service.ask(insert, **second)
    assert service.ask(insert, **first).is_repeated


@pytest.mark.parametrize("value", [float("nan"), {"deep": [float("inf")]}])
def test_an_answer_that_json_cannot_express_is_a_failure(service: Service, databases: Settings, value: Any) -> None:
    async def measure(change: Change, _: Wanted) -> None:
        await change.claim(Measured(value=value))

    with pytest.raises(ValueError, match="NaN"):
        service.ask(measure)
    assert query(databases, "SELECT key FROM idempotency_keys") == []


@pytest.mark.parametrize(("refusal", "status"), [(Refusal, 409), (SoldOut, 410)])
@pytest.mark.parametrize("claims", [False, True])
def test_a_refusal_undoes_the_change_and_is_stored(
    service: Service, databases: Settings, refusal: type[Refusal], status: int, claims: bool
) -> None:
    async def refuse(change: Change, wanted: Wanted) -> None:
        if claims:
            await change.claim(Made(id=wanted.item))
        await change.insert(wanted.item)
        raise refusal("no")

    assert service.ask(refuse).status == status
    assert items(databases) == []
    assert service.ask(insert) == Answer(status, service.ask(insert).body, is_repeated=True)
    assert items(databases) == []


def test_a_change_that_claims_no_answer_is_undone(service: Service, databases: Settings) -> None:
    async def forget(change: Change, wanted: Wanted) -> None:
        await change.insert(wanted.item)

    with pytest.raises(RuntimeError, match="POST /items"):
        service.ask(forget)
    assert items(databases) == []
    assert query(databases, "SELECT key FROM idempotency_keys") == []


def test_a_change_that_fails_keeps_no_claim(service: Service, databases: Settings) -> None:
    async def fail(change: Change, wanted: Wanted) -> None:
        assert await change.claim(Made(id=wanted.item))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        service.ask(fail)
    assert not service.ask(insert).is_repeated
    assert items(databases) == [ITEM]


def received(version: int, traceparent: str | None = None) -> Event:
    payload = {
        "movement_id": nth_key(2),
        "item_id": ITEM,
        "quantity": 1,
        "unit": "KGM",
        "stock_after": version,
        "version": version,
        "occurred_at": "2026-11-21T10:00:00.123456Z",
    }
    return Event("item", ITEM, "received", payload, traceparent=traceparent)


def test_an_event_keeps_its_trace_or_gets_that_of_the_request(service: Service, databases: Settings) -> None:
    own, of_request = (f"00-{digit * 32}-{digit * 16}-01" for digit in "ab")

    async def write(change: Change, wanted: Wanted) -> None:
        if await change.claim(Made(id=wanted.item)):
            await change.append(received(1), received(2, own))

    service.ask(write, traceparent=of_request)
    service.ask(write, key="other")
    found = query(databases, "SELECT traceparent FROM outbox ORDER BY id")
    assert [traceparent for (traceparent,) in found] == [of_request, own, None, own]


@pytest.mark.parametrize("kind", [wsgi.Answer, asgi.Answer])
def test_what_is_made_has_a_location_and_a_problem_its_type(kind: type[wsgi.Answer] | type[asgi.Answer]) -> None:
    made = kind(201, '{"id": "7"}').response("/items")
    assert (made.headers["Location"], made.headers["Content-Type"]) == ("/items/7", "application/json")
    problem = kind(409, "{}").response("/items")
    assert ("Location" in problem.headers, problem.headers["Content-Type"]) == (False, "application/problem+json")
