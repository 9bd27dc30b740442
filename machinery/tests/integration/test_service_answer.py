"""`Service.answer`: one transaction for a change, and its answer under the request's key."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import text

from outbox.base.settings import Settings
from outbox.http.idempotency import Answer, KeyReused
from outbox.http.problems import Kind
from outbox.http.service import Change, Service, WriteHeaders
from outbox.writing.event import Event
from outbox_lab.testing.helpers import query
from tests.support.made_events import nth_key

INSERT = text("INSERT INTO items (id, unit, stock, version) VALUES (:id, 'KGM', 0, 0)")
ITEM = nth_key(1)


class Refusal(Exception):
    """A refusal."""


class SoldOut(Refusal):
    """A more special one."""


class Wanted(BaseModel):
    """A request."""

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


@pytest.fixture
def service(databases: Settings) -> Service:
    return Service("Items", databases, REFUSALS)


def ask(
    service: Service,
    change: Callable[[Change, Wanted], None],
    *,
    key: str = "k",
    item: str = ITEM,
    traceparent: str | None = None,
    path: str = "/items",
    method: str = "POST",
    sent: str | None = None,
) -> Answer:
    """The answer to a request whose body is an item, or ``sent``."""
    app = service.app()
    for rule in ("/items", "/<owner>/items"):
        app.add_url_rule(rule, view_func=lambda **_: "", methods=["POST", "PUT", "DELETE"], endpoint=rule)
    body = json.dumps({"item": item}) if sent is None else sent
    with app.test_request_context(path, method=method, data=body, content_type="application/json"):
        header = WriteHeaders.model_validate({"Idempotency-Key": key, "traceparent": traceparent})
        return service.answer(header, Wanted(item=item), change)


def insert(change: Change, wanted: Wanted) -> None:
    if change.claim(Made(id=wanted.item)):
        change.connection.execute(INSERT, {"id": wanted.item})


def items(settings: Settings) -> list[str]:
    return [str(item) for (item,) in query(settings, "SELECT id FROM items")]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"path": "/alice/items"}, {"path": "/bob/items"}),
        ({"path": "/items?as=alice"}, {"path": "/items?as=bob"}),
        ({"sent": '{"secret": "a"}'}, {"sent": '{"secret": "b"}'}),
        ({"sent": '{"price": 0.1}'}, {"sent": '{"price": 0.10000000000000000001}'}),
        ({"sent": '{"price": 1}'}, {"sent": '{"price": "1"}'}),
        ({"sent": '{"a": {"b": []}}'}, {"sent": '{"a": {"b": {}}}'}),
    ],
)
def test_a_key_is_of_one_request_whatever_the_service_takes_of_it(
    service: Service, first: dict[str, str], second: dict[str, str]
) -> None:
    ask(service, insert, **first)
    with pytest.raises(KeyReused):
        ask(service, insert, **second)
    assert ask(service, insert, **first).is_repeated


def test_each_method_has_keys_of_its_own(service: Service) -> None:
    def write(change: Change, wanted: Wanted) -> None:
        change.claim(Made(id=wanted.item))

    assert not any(ask(service, write, method=method).is_repeated for method in ("POST", "PUT", "DELETE"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('{"a": 1, "b": {"c": 2.50, "d": null}}', '{ "b" : {"d":null,"c":2.50},\n"a":1}'),
        ('{"a": "\\u00e9"}', '{"a": "\u00e9"}'),
        ("{}", ""),
    ],
)
def test_a_body_written_otherwise_is_the_same_request(service: Service, first: str, second: str) -> None:
    assert not ask(service, insert, sent=first).is_repeated
    assert ask(service, insert, sent=second).is_repeated


def test_an_identical_retry_gets_the_first_answer_whatever_the_model_adds(service: Service) -> None:
    """A model's ``default_factory`` gives each request another value."""
    first = ask(service, insert, item=ITEM, sent="{}")
    second = ask(service, insert, item=nth_key(2), sent="{}")
    assert (second.is_repeated, second.body) == (True, first.body)


@pytest.mark.parametrize("value", [float("nan"), {"deep": [float("inf")]}])
def test_an_answer_that_json_cannot_express_is_a_failure(service: Service, databases: Settings, value: Any) -> None:
    def measure(change: Change, _: Wanted) -> None:
        change.claim(Measured(value=value))

    with pytest.raises(ValueError, match="NaN"):
        ask(service, measure)
    assert query(databases, "SELECT key FROM idempotency_keys") == []


@pytest.mark.parametrize(("refusal", "status"), [(Refusal, 409), (SoldOut, 410)])
@pytest.mark.parametrize("claims", [False, True])
def test_a_refusal_undoes_the_change_and_is_stored(
    service: Service, databases: Settings, refusal: type[Refusal], status: int, claims: bool
) -> None:
    def refuse(change: Change, wanted: Wanted) -> None:
        if claims:
            change.claim(Made(id=wanted.item))
        change.connection.execute(INSERT, {"id": wanted.item})
        raise refusal("no")

    assert ask(service, refuse).status == status
    assert items(databases) == []
    assert ask(service, insert) == Answer(status, ask(service, insert).body, is_repeated=True)
    assert items(databases) == []


def test_a_change_that_claims_no_answer_is_undone(service: Service, databases: Settings) -> None:
    def forget(change: Change, wanted: Wanted) -> None:
        change.connection.execute(INSERT, {"id": wanted.item})

    with pytest.raises(RuntimeError, match="POST /items"):
        ask(service, forget)
    assert items(databases) == []
    assert query(databases, "SELECT key FROM idempotency_keys") == []


def test_a_change_that_fails_keeps_no_claim(service: Service, databases: Settings) -> None:
    def fail(change: Change, wanted: Wanted) -> None:
        assert change.claim(Made(id=wanted.item))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ask(service, fail)
    assert not ask(service, insert).is_repeated
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

    def write(change: Change, wanted: Wanted) -> None:
        if change.claim(Made(id=wanted.item)):
            change.append(received(1), received(2, own))

    ask(service, write, traceparent=of_request)
    ask(service, write, key="other")
    found = query(databases, "SELECT traceparent FROM outbox ORDER BY id")
    assert [traceparent for (traceparent,) in found] == [of_request, own, None, own]


def test_what_is_made_has_a_location_and_a_problem_its_type() -> None:
    made = Answer(201, '{"id": "7"}').response("/items")
    assert (made.headers["Location"], made.mimetype) == ("/items/7", "application/json")
    problem = Answer(409, "{}").response("/items")
    assert ("Location" in problem.headers, problem.mimetype) == (False, "application/problem+json")
