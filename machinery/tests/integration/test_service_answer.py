"""`Service.answer`, of Flask and of FastAPI: one transaction for a change, and its answer under the request's key."""

from __future__ import annotations

import inspect
import json
import pkgutil
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import fastapi
import flask
import pytest
from fastapi import APIRouter
from flask import request
from pydantic import BaseModel, ConfigDict
from sqlalchemy import Engine, event, text
from werkzeug.test import Client

from outbox import asgi, web
from outbox.base.settings import Secret, Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.events import catalog
from outbox.http.change import Answer, Key, WriteHeaders, first_answer
from outbox.http.problems import Kind
from outbox.writing.event import Event
from outbox_lab.testing.helpers import Application, all_at_once, as_wsgi, outbox_records, query
from tests import items, stock
from tests.stock import SERVICES, audit
from tests.support.made_events import nth_key
from tests.transactions import new_item

CLIENTS = 8
INSERT = text("INSERT INTO items (id, unit, stock, version) VALUES (:id, 'KGM', 0, 0)")
ITEM = nth_key(1)
HEADERS = ("Idempotency-Key", "traceparent")
ROUTES = ("/items", "/{}/items")
TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


class Refusal(Exception):
    """A refusal."""


class SoldOut(Refusal):
    """A more special one."""


REFUSALS: dict[type[Exception], Kind] = {
    Refusal: Kind(HTTPStatus.CONFLICT, "/problems/refused", "Refused"),
    SoldOut: Kind(HTTPStatus.GONE, "/problems/sold-out", "Sold out"),
}


class Wanted(BaseModel):
    """A request."""

    model_config = ConfigDict(extra="allow")

    item: str = ITEM


class Made(BaseModel):
    """An answer."""

    id: Any


class Change:
    """A change in either framework: each test writes one coroutine for both."""

    def __init__(self, change: web.Change | asgi.Change) -> None:
        self._change = change

    async def claim(self, made: BaseModel) -> bool:
        claimed = self._change.claim(made)
        return await claimed if inspect.isawaitable(claimed) else claimed

    async def append(self, *events: Event) -> None:
        appended = self._change.append(*events)
        if inspect.isawaitable(appended):
            await appended

    async def insert(self, item: str) -> None:
        if isinstance(self._change, asgi.Change):
            self._change.session.add(new_item(uuid.UUID(item)))
        else:
            self._change.connection.execute(INSERT, {"id": item})


Work = Callable[[Change, Wanted], Coroutine[Any, Any, None]]


def flask_app(settings: Settings, work: Work) -> flask.Flask:
    service = web.Service("Items", settings, REFUSALS)
    app = service.app()

    def finish(change: web.Change, wanted: Wanted) -> None:
        with suppress(StopIteration):  # nothing in it waits
            work(Change(change), wanted).send(None)

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
        await work(Change(change), wanted)

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
        kind = "problem+json" if sent.status_code >= HTTPStatus.BAD_REQUEST else "json"
        assert sent.content_type == f"application/{kind}"
        return sent.status_code, json.loads(sent.text)


@pytest.fixture(params=[flask_app, fastapi_app], ids=["flask", "fastapi"])
def service(request: pytest.FixtureRequest, databases: Settings) -> Service:
    return Service(databases, request.param)


@pytest.fixture(params=[*SERVICES.values()], ids=[*SERVICES])
def app(databases: Settings, request: pytest.FixtureRequest) -> Iterator[Application]:
    """The fixture domain's application in each framework, with a connection for each of eight clients."""
    with as_wsgi(pkgutil.resolve_name(request.param)(databases.replace(service_threads=CLIENTS))) as app:
        yield app


async def insert(change: Change, wanted: Wanted) -> None:
    if await change.claim(Made(id=wanted.item)):
        await change.insert(wanted.item)


async def forget(change: Change, wanted: Wanted) -> None:
    await change.insert(wanted.item)


async def fail(change: Change, wanted: Wanted) -> None:
    assert await change.claim(Made(id=wanted.item))
    raise ZeroDivisionError


async def measure(change: Change, _: Wanted) -> None:
    await change.claim(Made(id={"deep": [float("inf")]}))


def rows(settings: Settings) -> tuple[list[str], list[str]]:
    """The items that were made, and the keys that were claimed."""
    found = query(settings, "SELECT id::text FROM items"), query(settings, "SELECT key FROM idempotency_keys")
    return [item for (item,) in found[0]], [key for (key,) in found[1]]


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


@pytest.mark.parametrize(("refusal", "status", "claims"), [(Refusal, 409, False), (SoldOut, 410, True)])
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
    assert rows(databases) == ([], ["k"])


@pytest.mark.parametrize("work", [forget, fail, measure], ids=["claims nothing", "raises", "answers what is no JSON"])
def test_a_change_that_fails_keeps_no_claim(service: Service, databases: Settings, work: Work) -> None:
    assert service.ask(work)[0] == 500
    assert rows(databases) == ([], [])
    assert service.ask(insert)[0] == 201
    assert rows(databases) == ([ITEM], ["k"])


def received(version: int, traceparent: str | None = None) -> Event:
    payload = items.payload(nth_key(2), ITEM, 1, version, total_after=version)
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


# The fixture domain's services ------------------------------------------------------------------------------------


def test_rows_event_and_answer_are_written_together(client: stock.Client, databases: Settings) -> None:
    client.move(ITEM, 500)
    response = client.move(ITEM, -120, traceparent=TRACEPARENT)
    made = response.get_json()
    assert (response.status_code, made["stock_after"]) == (201, 380)
    first, second = outbox_records(databases)
    assert (first["headers"]["eventType"], first["headers"]["traceparent"]) == ("received", None)
    assert (second["headers"]["eventType"], second["headers"]["traceparent"]) == ("picked", TRACEPARENT)
    assert second["key"] == ITEM
    expected = items.payload(made["id"], ITEM, -120, 2, total_after=380)
    assert second["value"] == {**expected, "occurred_at": made["occurred_at"]}
    for one in (first, second):
        version = int(one["headers"]["schemaVersion"])
        schema = catalog.of_project(databases).schema(items.AGGREGATE, one["headers"]["eventType"], version)
        schema.require_valid(one["value"])
    assert audit(databases) == {}
    kept = query(
        databases, "SELECT DISTINCT round(extract(epoch FROM expires_at - now()) / 3600) FROM idempotency_keys"
    )
    assert kept == [(databases.idempotency_ttl_hours,)]


def test_of_requests_with_one_key_at_once_one_is_made(app: Application, databases: Settings) -> None:
    clients = [stock.Client(app, databases) for _ in range(CLIENTS)]
    same = all_at_once(CLIENTS, lambda number: clients[number].move(ITEM, 10, key="same"))
    assert {answer.status_code for answer in same} == {201}
    assert len({answer.data for answer in same}) == 1
    # Different items, so that nothing but the key brings them together.
    different = all_at_once(CLIENTS, lambda number: clients[number].move(nth_key(number), 1, key="different"))
    assert Counter(answer.status_code for answer in different) == {201: 1, 409: CLIENTS - 1}
    assert len(outbox_records(databases)) == 2
    assert audit(databases) == {}


# The statements, which are the same for both frameworks ------------------------------------------------------------

KEY = Key("POST /movements", "k", b"hash", ttl_hours=24)


def claim(engine: Engine, key: Key, body: str) -> Answer:
    with engine.begin() as connection:
        return first_answer(connection, key, Answer(201, body))


def test_an_expired_key_may_be_used_again_and_is_deleted_by_later_claims(databases: Settings, engine: Engine) -> None:
    expired = "UPDATE idempotency_keys SET expires_at = now()"
    for number in range(12):
        claim(engine, replace(KEY, key=f"k{number}"), "first")
    query(databases, f"{expired} WHERE key = 'k0'")
    other = replace(KEY, key="k0", request_hash=b"other")
    assert claim(engine, other, "second") == Answer(201, "second")
    assert claim(engine, other, "third") == Answer(201, "second", is_repeated=True)
    query(databases, expired)
    for number in range(6):
        claim(engine, replace(KEY, key=f"new{number}"), "first")
    left = "SELECT count(*), count(*) FILTER (WHERE expires_at > now()) FROM idempotency_keys"
    assert query(databases, left) == [(6, 6)], "each claim deletes two expired keys"


def test_a_request_takes_over_the_key_of_one_that_is_rolled_back(databases: Settings, engine: Engine) -> None:
    with engine.connect() as first, ThreadPoolExecutor(1) as pool:
        assert first_answer(first, KEY, Answer(201, "first")) == Answer(201, "first")
        second = pool.submit(claim, engine, KEY, "second")
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        wait_for("the second to wait", lambda: query(databases, waiting, SourceRole.APP), timeout_s=10)
        first.rollback()
        assert second.result(10) == Answer(201, "second")


def test_a_key_that_expires_between_claim_and_answer_is_not_deleted(databases: Settings, engine: Engine) -> None:
    kept: list[list[tuple[object, ...]]] = []

    def claim_another(*_: object) -> None:
        if not kept:
            kept.append([])
            claim(engine, replace(KEY, key="other"), "other")
            kept[0] = query(databases, "SELECT key FROM idempotency_keys WHERE expires_at <= now()")

    claim(engine, KEY, "first")
    with engine.begin() as second:
        second.execute(text("SELECT 1"))  # its time is that of its first statement
        query(databases, "UPDATE idempotency_keys SET expires_at = clock_timestamp()")
        event.listen(second, "after_cursor_execute", claim_another)
        assert first_answer(second, KEY, Answer(201, "second")) == Answer(201, "first", is_repeated=True)
    assert kept == [[("k",)]], "others see it expired, and find it locked"
