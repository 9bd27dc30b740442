"""`Service.answer`, of Flask and of FastAPI: one transaction for a change, and its answer under the request's key."""

from __future__ import annotations

import pkgutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import fastapi
import flask
import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, event, text

from outbox import asgi, web
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.events import catalog
from outbox.http.change import Answer, Key, first_answer
from outbox.writing.event import Event
from outbox_lab.testing.helpers import Application, ServiceClient, all_at_once, as_wsgi, outbox_records, query
from stock import service as stock_service
from tests import items
from tests.stock import SERVICES, Client, audit
from tests.support.made_events import nth_key
from tests.transactions import new_item

CLIENTS = 8
ITEM = nth_key(1)
MOVEMENT = {"item_id": ITEM, "quantity": 7, "unit": "KGM"}


@pytest.fixture(params=[*SERVICES.values()], ids=[*SERVICES])
def app(databases: Settings, request: pytest.FixtureRequest) -> Iterator[Application]:
    """The fixture domain's application in each framework, with a connection for each of eight clients."""
    with as_wsgi(pkgutil.resolve_name(request.param)(databases.replace(service_threads=CLIENTS))) as app:
        yield app


def make_events_by(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Event]) -> None:
    """Let both services make their events so, which they do when they have claimed the key and written their rows."""
    for service in SERVICES.values():
        monkeypatch.setattr(f"{service.partition(':')[0]}.event", make)


def rows(settings: Settings) -> tuple[list[str], list[str]]:
    """The items that were made, and the keys that were claimed."""
    found = query(settings, "SELECT id::text FROM items"), query(settings, "SELECT key FROM idempotency_keys")
    return [item for (item,) in found[0]], [key for (key,) in found[1]]


def test_rows_event_and_answer_are_written_together(client: Client, databases: Settings) -> None:
    client.move(ITEM, 500)
    response = client.move(ITEM, -120)
    made = response.get_json()
    assert (response.status_code, made["stock_after"]) == (201, 380)
    first, second = outbox_records(databases)
    assert [one["headers"]["eventType"] for one in (first, second)] == ["received", "picked"]
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


@pytest.mark.parametrize(
    ("path", "item"),
    [("/movements?as=bob", ITEM), ("/movements", ITEM.replace("-", ""))],
    ids=["query", "body of equal fields"],
)
def test_a_key_is_of_one_request_whatever_the_service_takes_of_it(
    client: Client, databases: Settings, path: str, item: str
) -> None:
    made = client.post("/movements", MOVEMENT, Idempotency_Key="k")
    assert (made.status_code, made.content_type) == (201, "application/json")
    refused = client.post(path, MOVEMENT | {"item_id": item}, Idempotency_Key="k")
    assert (refused.status_code, refused.get_json()["type"]) == (409, "/problems/idempotency-key-reused")
    assert refused.content_type == "application/problem+json"
    assert client.post("/movements", MOVEMENT, Idempotency_Key="k").data == made.data
    assert len(outbox_records(databases)) == 1


class Made(BaseModel):
    """An answer."""

    id: str


def flask_app(settings: Settings) -> flask.Flask:
    service = web.Service("Items", settings)
    app = service.app()

    def claim(change: web.Change, owner: str) -> None:
        change.claim(Made(id=owner))

    def answer(owner: str) -> flask.Response:
        return service.answer(web.WriteHeaders.model_validate({"Idempotency-Key": "k"}), owner, claim).response()

    app.add_url_rule("/<owner>/items", view_func=answer, methods=["POST"])
    return app


def fastapi_app(settings: Settings) -> fastapi.FastAPI:
    service = asgi.Service("Items", settings)
    api = fastapi.APIRouter()

    async def insert(change: asgi.Change, owner: str) -> None:
        if await change.claim(Made(id=owner)):
            change.session.add(new_item(uuid.UUID(ITEM)))  # a second one would fail

    @api.post("/{owner}/items")
    async def answer(header: asgi.WriteHeaders, owner: str) -> fastapi.Response:
        return (await service.answer(header, owner, insert)).response()

    return service.app(api)


@pytest.mark.parametrize("make", [flask_app, fastapi_app])
def test_a_key_is_of_one_path(databases: Settings, make: Callable[[Settings], Application]) -> None:
    with as_wsgi(make(databases)) as app:
        client = ServiceClient(app, databases)
        made, other, again = (client.post(f"/{one}/items", Idempotency_Key="k") for one in ("ada", "bob", "ada"))
    assert (made.status_code, other.status_code, again.data) == (201, 409, made.data)
    assert rows(databases)[1] == ["k"]


def test_a_refusal_undoes_the_change_and_is_stored(
    client: Client, databases: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Event:
        raise stock_service.UnitMismatch("no")

    with monkeypatch.context() as patch:
        make_events_by(patch, refuse)
        refused = client.move(ITEM, 1, key="k")
    assert (refused.status_code, refused.get_json()["detail"]) == (409, "no")
    assert rows(databases) == ([], ["k"])
    assert client.move(ITEM, 1, key="k").data == refused.data


def test_a_change_that_fails_keeps_no_claim(
    client: Client, databases: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Event:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        make_events_by(patch, fail)
        assert client.move(ITEM, 1, key="k").status_code == 500
    assert rows(databases) == ([], [])
    assert client.move(ITEM, 1, key="k").status_code == 201
    assert rows(databases) == ([ITEM], ["k"])


def test_an_event_keeps_its_trace_or_gets_that_of_the_request(
    client: Client, databases: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, of_request = (f"00-{digit * 32}-{digit * 16}-01" for digit in "ab")
    made = stock_service.event
    client.move(ITEM, 1)
    client.move(ITEM, 1, traceparent=of_request)
    make_events_by(monkeypatch, lambda *of: replace(made(*of), traceparent=own))
    client.move(ITEM, 1, traceparent=of_request)
    found = query(databases, "SELECT traceparent FROM outbox ORDER BY id")
    assert [traceparent for (traceparent,) in found] == [None, of_request, own]


def test_of_requests_with_one_key_at_once_one_is_made(app: Application, databases: Settings) -> None:
    clients = [Client(app, databases) for _ in range(CLIENTS)]
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
