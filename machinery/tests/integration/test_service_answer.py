"""`Service.answer`, of Flask and of FastAPI: one transaction for a change, and its answer under the request's key."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol

import fastapi
import flask
import pytest
from fastapi import APIRouter
from flask import request
from pydantic import BaseModel, ConfigDict
from sqlalchemy import text
from werkzeug.test import Client

from outbox import asgi, web
from outbox.base.settings import Secret, Settings
from outbox.http.change import WriteHeaders
from outbox.http.problems import Kind
from outbox.writing.event import Event
from outbox_lab.testing.helpers import Application, as_wsgi, query
from tests.support.made_events import nth_key
from tests.transactions import new_item

INSERT = text("INSERT INTO items (id, unit, stock, version) VALUES (:id, 'KGM', 0, 0)")
ITEM = nth_key(1)
HEADERS = ("Idempotency-Key", "traceparent")
ROUTES = ("/items", "/{}/items")


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

    def __init__(self, change: web.Change) -> None:
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


def flask_app(settings: Settings, work: Work) -> flask.Flask:
    service = web.Service("Items", settings, REFUSALS)
    app = service.app()

    def finish(change: web.Change, wanted: Wanted) -> None:
        with suppress(StopIteration):  # nothing in it waits
            work(FlaskChange(change), wanted).send(None)

    def answer(owner: str = "", body: object = None) -> flask.Response:
        header = WriteHeaders.model_validate({name: request.headers.get(name) for name in HEADERS})
        return service.answer(header, Wanted(), finish).response()

    for rule in ROUTES:
        app.add_url_rule(rule.format("<owner>"), view_func=answer, methods=["POST"], endpoint=rule)
    return app


def fastapi_app(settings: Settings, work: Work) -> fastapi.FastAPI:
    service = asgi.Service("Items", settings, REFUSALS)
    api = APIRouter()

    async def finish(change: asgi.Change, wanted: Wanted) -> None:
        await work(FastapiChange(change), wanted)

    for rule in ROUTES:

        @api.post(rule.format("{owner}"))
        async def answer(header: asgi.WriteHeaders, body: Wanted) -> fastapi.Response:
            return (await service.answer(header, Wanted(), finish)).response()

    return service.app(api)


@dataclass
class Service:
    """A service in one framework. Each request makes the change that the test asks for."""

    settings: Settings
    make: Callable[[Settings, Work], Application]

    def ask(self, work: Work, path: str = "/items", body: str = "{}", **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and content of the answer to a request, whose key is ``k`` unless the headers say another."""
        headers = {"Idempotency-Key": "k", "Authorization": "Bearer secret", **headers}
        with as_wsgi(self.make(self.settings.replace(service_token=Secret("secret")), work)) as app:
            sent = Client(app).post(path, data=body, content_type="application/json", headers=headers)
        return sent.status_code, json.loads(sent.text)


@pytest.fixture(params=[flask_app, fastapi_app], ids=["flask", "fastapi"])
def service(request: pytest.FixtureRequest, databases: Settings) -> Service:
    return Service(databases, request.param)


async def insert(change: Change, wanted: Wanted) -> None:
    if await change.claim(Made(id=wanted.item)):
        await change.insert(wanted.item)


def items(settings: Settings) -> list[str]:
    return [str(item) for (item,) in query(settings, "SELECT id FROM items")]


def keys(settings: Settings) -> list[Any]:
    return query(settings, "SELECT key FROM idempotency_keys")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"path": "/alice/items"}, {"path": "/bob/items"}),
        ({"path": "/items?as=alice"}, {"path": "/items?as=bob"}),
        ({"body": '{"secret": "a"}'}, {"body": '{"secret": "b"}'}),
    ],
)
def test_a_key_is_of_one_request_whatever_the_service_takes_of_it(
    service: Service, first: dict[str, str], second: dict[str, str]
) -> None:
    made = service.ask(insert, **first)
    assert made == (201, {"id": ITEM})
    status, problem = service.ask(insert, **second)
    assert (status, problem["type"]) == (409, "/problems/idempotency-key-reused")
    assert service.ask(insert, **first) == made, "a second row of the item would fail"


@pytest.mark.parametrize("value", [float("nan"), {"deep": [float("inf")]}])
def test_an_answer_that_json_cannot_express_is_a_failure(service: Service, databases: Settings, value: Any) -> None:
    async def measure(change: Change, _: Wanted) -> None:
        await change.claim(Measured(value=value))

    assert service.ask(measure)[0] == 500
    assert keys(databases) == []


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

    refused = service.ask(refuse)
    assert (refused[0], refused[1]["detail"]) == (status, "no")
    assert service.ask(insert) == refused
    assert items(databases) == []


async def forget(change: Change, wanted: Wanted) -> None:
    await change.insert(wanted.item)


async def fail(change: Change, wanted: Wanted) -> None:
    assert await change.claim(Made(id=wanted.item))
    raise ZeroDivisionError


@pytest.mark.parametrize("work", [forget, fail])
def test_a_change_that_fails_keeps_no_claim(service: Service, databases: Settings, work: Work) -> None:
    """To forget the claim is a failure too."""
    assert service.ask(work)[0] == 500
    assert (items(databases), keys(databases)) == ([], [])
    assert service.ask(insert)[0] == 201
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
    service.ask(write, **{"Idempotency-Key": "other"})
    found = query(databases, "SELECT traceparent FROM outbox ORDER BY id")
    assert [traceparent for (traceparent,) in found] == [of_request, own, None, own]


@pytest.mark.parametrize("kind", [web.Answer, asgi.Answer])
def test_what_is_made_has_a_location_and_a_problem_its_type(kind: type[web.Answer] | type[asgi.Answer]) -> None:
    made = kind(201, '{"id": "7"}').response("/items")
    assert (made.headers["Location"], made.headers["Content-Type"]) == ("/items/7", "application/json")
    problem = kind(409, "{}").response("/items")
    assert ("Location" in problem.headers, problem.headers["Content-Type"]) == (False, "application/problem+json")
