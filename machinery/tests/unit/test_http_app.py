"""The generic part of a service, in Flask and in FastAPI, without a database: bodies, and the declared problems."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from fastapi import HTTPException
from starlette.types import Message
from structlog.testing import capture_logs
from werkzeug.exceptions import NotFound
from werkzeug.test import Client, TestResponse

from outbox.base import project
from outbox.base.settings import Settings, load
from outbox.commands.serve import serve
from outbox.http.body import MAX_BYTES
from outbox.http.change import Key
from outbox.http.problems import KeyReused, Kind
from outbox_lab.testing.failures import raises
from outbox_lab.testing.helpers import Application, as_wsgi
from tests.support import echo
from tests.support.echo import PATH

PAGES = {"flask": "/docs/swagger", "fastapi": "/docs"}
AUTHORIZED = {"Authorization": "Bearer secret"}
ADAPTERS: dict[str, Callable[..., Application]] = {"flask": echo.create_app, "fastapi": echo.create_async_app}


class OutOfStock(Exception):
    """A refusal that a service declares."""


class NoneLeft(OutOfStock):
    """A special one."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    with capture_logs():  # to print a traceback takes seconds
        yield load(tmp_path_factory.mktemp("home"), environment=False, service_token="secret")


@pytest.fixture(scope="module", params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> str:
    """The framework of the application."""
    return str(request.param)


@pytest.fixture(scope="module")
def app(settings: Settings, adapter: str) -> Iterator[Application]:
    with as_wsgi(ADAPTERS[adapter](settings)) as app:
        yield app


def post(app: Application, body: bytes, content_type: str = "application/json") -> TestResponse:
    return Client(app).post(PATH, data=body, content_type=content_type, headers=AUTHORIZED)


@pytest.mark.parametrize("text", ["héllo \u00e9 😀", "\\u0000 \t\x7f\ufffe\U0001f600"])
@pytest.mark.parametrize("is_escaped", [True, False])
def test_a_body_in_utf_8_is_accepted(app: Application, text: str, is_escaped: bool) -> None:
    response = post(app, json.dumps({"text": text}, ensure_ascii=is_escaped).encode())
    assert (response.status_code, response.text) == (200, text)


def test_the_page_of_the_api_needs_no_token_and_loads_from_this_host_alone(app: Application, adapter: str) -> None:
    client = Client(app)
    page = client.get(PAGES[adapter])
    assert page.status_code == HTTPStatus.OK
    assert page.headers["Content-Security-Policy"].startswith("default-src 'self'")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == {"flask": 4, "fastapi": 3}[adapter]
    for path in loaded:
        with client.get(urljoin(PAGES[adapter], path)) as response:
            assert response.status_code == HTTPStatus.OK
    assert adapter == "fastapi" or '"validatorUrl": null' in page.text


def test_a_web_page_whose_name_leads_here_reads_no_metrics(app: Application) -> None:
    assert Client(app).get("/metrics", base_url="http://127.0.0.1:8080").status_code == HTTPStatus.OK
    refused = Client(app).get("/metrics", base_url="http://evil.example:8080")
    assert refused.status_code == HTTPStatus.MISDIRECTED_REQUEST
    assert "http_request" not in refused.text


@pytest.mark.parametrize("charset", ["", "; charset={}"])
@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        *(('{"text": "hello"}', encoding) for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-32-be", "cp037")),
        ('{"text": "a", "text": "a"}', "utf-8"),
        ('{"text": "a", "t\\u0065xt": "b"}', "utf-8"),
        ('{"text": "a", "other": [[{"b": 1, "b": 2}]]}', "utf-8"),
        ('{"text": "\xff"}', "latin-1"),
        ('{"text": NaN}', "utf-8"),
        ('{"x": 1e400}', "utf-8"),
        ("1" * 5000, "utf-8"),
    ],
)
def test_a_body_that_is_not_json_in_utf_8_or_repeats_a_key_is_400(
    app: Application, body: str, encoding: str, charset: str
) -> None:
    assert_problem(post(app, body.encode(encoding), f"application/json{charset.format(encoding)}"), 400)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{"text": "a\\u0000b"}', "text"),
        ('{"text": "\\ud800"}', "text"),
        ('{"text": "a", "more": {"lines": [1, {"note": "\\udfff\\ud800"}]}}', "more.lines.1.note"),
        ('{"text": "a", "\\u0000": 1}', ""),
        ('{"text": "a", "more": [{"\\ud800": "\\ud800"}]}', "more.0"),
    ],
)
def test_a_text_that_no_database_holds_is_422_and_named(app: Application, body: str, field: str) -> None:
    response = post(app, body.encode())
    assert_problem(response, 422)
    assert [error["field"] for error in json.loads(response.text)["errors"]] == [field]


@pytest.mark.parametrize(
    ("url", "cookie", "status", "field"),
    [
        ("/texts/a%00b", "", 404, "name"),
        ("/texts/a?p=1&q=2&q=a%00b", "", 422, "q"),
        ("/texts/a", r'q="a\000b"', 422, "q"),
    ],
    ids=["path", "query", "cookie"],
)
def test_a_text_elsewhere_that_no_database_holds_is_refused_and_named(
    app: Application, url: str, cookie: str, status: int, field: str
) -> None:
    response = Client(app, use_cookies=False).get(url, headers={**AUTHORIZED, "Cookie": cookie})
    assert_problem(response, status)
    found = json.loads(response.text)
    assert f" {field} " in found["detail"] or [error["field"] for error in found["errors"]] == [field]


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"", None, 200),
        (b"", "application/x-www-form-urlencoded", 200),  # as `curl --data ""` sends it
        (b"{}", "application/json", 200),
        (b"{}", None, 415),
        (b"[]", "application/json", 400),
        (b'{"reason": "x", "all": 1}', "application/json", 422),
    ],
)
def test_a_route_without_a_body_takes_none_or_an_empty_object(
    app: Application, method: str, body: bytes, content_type: str | None, status: int
) -> None:
    sent: dict[str, Any] = {"data": body, "content_type": content_type, "headers": AUTHORIZED}
    response = Client(app).open("/texts/a/read", method=method, **sent)
    assert response.status_code == status
    if status == 422:
        assert [error["field"] for error in json.loads(response.text)["errors"]] == ["reason", "all"]


def test_a_route_with_a_body_needs_one(app: Application) -> None:
    assert_problem(Client(app).post(PATH, headers=AUTHORIZED), 415)
    assert_problem(post(app, b""), 400)
    assert_problem(post(app, b"{}"), 422)
    invalid = post(app, b'{"text": 1}')
    assert_problem(invalid, 422)
    assert [error["field"] for error in json.loads(invalid.text)["errors"]] == ["text"]
    assert_problem(post(app, json.dumps({"text": "x" * MAX_BYTES}).encode()), 413)


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/nowhere", 404), ("DELETE", PATH, 405)])
def test_a_request_without_a_route_is_refused_whatever_its_body(
    app: Application, method: str, path: str, status: int
) -> None:
    response = Client(app).open(path, method=method, json={"field": 1}, headers=AUTHORIZED)
    assert_problem(response, status)
    assert status == 404 or "POST" in response.headers["Allow"]


def test_a_response_that_is_not_json_is_500(app: Application) -> None:
    assert_problem(Client(app).get("/infinity", headers=AUTHORIZED), 500)


@pytest.mark.parametrize(
    ("error", "status", "type_"),
    [
        (OutOfStock("none left"), 409, "/problems/out-of-stock"),
        (NoneLeft("none left"), 409, "/problems/out-of-stock"),
        (KeyReused(), 409, "/problems/idempotency-key-reused"),
        ("not found", 404, "about:blank"),
        (RuntimeError("a bug"), 500, "about:blank"),
    ],
)
def test_an_exception_becomes_the_problem_that_is_declared_for_it(
    settings: Settings, adapter: str, error: Exception | str, status: int, type_: str
) -> None:
    of_framework = {"flask": NotFound("nothing here"), "fastapi": HTTPException(404, "nothing here")}

    def fail() -> None:
        raise error if isinstance(error, Exception) else of_framework[adapter]

    refusals = {OutOfStock: Kind(HTTPStatus.CONFLICT, "/problems/out-of-stock", "Out of stock")}
    with as_wsgi(ADAPTERS[adapter](settings, refusals, fail)) as app:
        response = Client(app).get("/fail", headers=AUTHORIZED)
    assert_problem(response, status)
    assert json.loads(response.text)["type"] == type_


@pytest.mark.parametrize("path", ["/echo", "/nowhere", "/healthz/", "/docs2"])
@pytest.mark.parametrize("token", [None, "Bearer wrong", "Basic secret", "Bearer ", "bearer secret2"])
def test_every_path_needs_the_token(app: Application, path: str, token: str | None) -> None:
    response = Client(app).get(path, headers={"Authorization": token} if token else {})
    assert_problem(response, 401)
    assert response.headers["WWW-Authenticate"] == "Bearer realm=service"


def test_a_service_is_never_open_by_default(tmp_path: Path, adapter: str) -> None:
    with raises("service-token-missing"):
        ADAPTERS[adapter](load(tmp_path, environment=False))


def test_a_body_that_never_ends_is_refused_while_it_arrives(settings: Settings) -> None:
    sent, answers, part = 0, list[Message](), b"x" * 1024

    async def receive() -> Message:
        nonlocal sent
        sent += len(part)
        return {"type": "http.request", "body": part, "more_body": sent < 100 * MAX_BYTES}

    async def send(message: Message) -> None:
        answers.append(message)

    headers = [(b"authorization", b"Bearer secret"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": headers}
    asyncio.run(echo.create_async_app(settings)(scope, receive, send))
    assert answers[0]["status"] == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    assert sent == MAX_BYTES + len(part)


def test_every_response_that_is_no_success_is_described_as_a_problem(app: Application) -> None:
    document = Client(app).get("/openapi.json").get_json()
    assert set(document["components"]["schemas"]) >= {"Problem", "FieldError"}
    described = document["paths"][PATH]["post"]
    assert described["security"] == [{"bearer": []}]
    assert document["components"]["securitySchemes"] == {"bearer": {"type": "http", "scheme": "bearer"}}
    for status, response in described["responses"].items():
        assert status == "200" or list(response["content"]) == ["application/problem+json"], status


def test_requests_are_counted_by_the_template_of_their_route(app: Application, adapter: str) -> None:
    client = Client(app)
    client.get("/texts/counted", headers=AUTHORIZED)
    client.get("/nowhere-else", headers=AUTHORIZED)
    template = {"flask": "/texts/<name>", "fastapi": "/texts/{name}"}[adapter]
    counted = client.get("/metrics", base_url="http://127.0.0.1:8080").text
    assert f'count{{method="GET",route="{template}",status="200"}}' in counted
    assert 'count{method="GET",route="unknown",status="404"}' in counted
    assert "counted" not in counted


@pytest.mark.parametrize("name", ["", "service.app", ":create_app", "service.app:", "service.app:create_app()"])
def test_a_service_must_be_named_by_module_and_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / project.FILE).write_text(f'[tool.outbox]\nservice = "{name}"\n')
    monkeypatch.setenv(project.VARIABLE, str(tmp_path))
    with raises("project-wrong", "module:function"):
        serve.main([], standalone_mode=False)


def test_a_key_is_of_one_request_however_its_body_is_written() -> None:
    def hash_of(body: str = "", method: str = "POST", path: str = "/items", query: bytes = b"") -> bytes:
        found = Key.of_request("k", 24, method=method, route="/", path=path, query=query, body=body.encode())
        return found.request_hash

    assert hash_of('{"a": 1, "b": {"c": 2.50}}') == hash_of('{ "b" : {"c":2.50},\n"a":1}')
    assert hash_of('{"a": "\\u00e9"}') == hash_of('{"a": "\u00e9"}')
    assert hash_of("{}") == hash_of("")
    bodies = ['{"a": 0.1}', '{"a": 0.10000000000000000001}', '{"a": 1}', '{"a": "1"}', '{"a": []}', ""]
    others = [hash_of(method="PUT"), hash_of(path="/items/1"), hash_of(query=b"a=1"), hash_of(path="/items?a=1")]
    assert len({*map(hash_of, bodies), *others}) == len(bodies) + len(others)


def assert_problem(response: TestResponse, status: int) -> None:
    assert response.status_code == status, response.text
    assert response.content_type == "application/problem+json"
    assert json.loads(response.text)["status"] == status
