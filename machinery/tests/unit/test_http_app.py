"""The generic part of a service, without a database: bodies, and the problems that a service declares."""

from __future__ import annotations

import codecs
import json
import re
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, Response
from flask_openapi3.blueprint import APIBlueprint
from werkzeug.exceptions import NotFound
from werkzeug.test import TestResponse

from outbox.base import project
from outbox.base.settings import Settings, load
from outbox.commands.serve import serve
from outbox.http.app import Metrics, make_app
from outbox.http.database import make_engine
from outbox.http.idempotency import KeyReused
from outbox.http.problems import Kind
from outbox_lab.testing.failures import raises
from tests.support.echo import PATH, create_app

AUTHORIZED = {"Authorization": "Bearer secret"}
BODY = '{"text": "hello"}'


class OutOfStock(Exception):
    """A refusal that a service declares."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    home: Path = tmp_path_factory.mktemp("home")
    return load(home, environment=False, service_token="secret")


@pytest.fixture(scope="module")
def app(settings: Settings) -> Flask:
    return create_app(settings)


def post(app: Flask, body: bytes, content_type: str = "application/json") -> TestResponse:
    return app.test_client().post(PATH, data=body, content_type=content_type, headers=AUTHORIZED)


def test_a_body_in_utf_8_is_accepted(app: Flask) -> None:
    response = post(app, '{"text": "héllo \\u00e9 😀"}'.encode())
    assert (response.status_code, response.text) == (200, "héllo é 😀")


def test_the_page_of_the_api_needs_no_token_and_loads_from_this_host_alone(app: Flask) -> None:
    client = app.test_client()
    page = client.get("/docs/swagger")
    assert page.status_code == HTTPStatus.OK
    assert page.headers["Content-Security-Policy"].startswith("default-src 'self'")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 4
    for path in loaded:
        with client.get(f"/docs/{path}") as response:
            assert response.status_code == HTTPStatus.OK
    assert '"validatorUrl": null' in page.text


def test_without_its_package_there_is_no_page_of_the_api(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.http.app.find_spec", lambda _: None)
    response = create_app(settings).test_client().get("/docs/swagger", headers=AUTHORIZED)
    assert response.status_code == HTTPStatus.NOT_FOUND


def test_a_web_page_whose_name_leads_here_reads_no_metrics(app: Flask) -> None:
    assert app.test_client().get("/metrics", base_url="http://127.0.0.1:8080").status_code == HTTPStatus.OK
    refused = app.test_client().get("/metrics", base_url="http://evil.example:8080")
    assert refused.status_code == HTTPStatus.MISDIRECTED_REQUEST
    assert "http_request" not in refused.text


@pytest.mark.parametrize(
    "body",
    [
        '{"text": "a", "text": "b"}',
        '{"text": "a", "text": "a"}',
        '{"text": "a", "t\\u0065xt": "b"}',
        '{"text": "a", "other": {"b": 1, "b": 2}}',
        '{"text": "a", "other": [[{"b": 1, "b": 2}]]}',
    ],
)
def test_a_repeated_key_is_400(app: Flask, body: str) -> None:
    assert_problem(post(app, body.encode()), 400)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "cp037"])
@pytest.mark.parametrize("charset", ["", "; charset={encoding}"])
def test_a_body_in_another_encoding_than_utf_8_is_400(app: Flask, encoding: str, charset: str) -> None:
    assert_problem(post(app, BODY.encode(encoding), f"application/json{charset.format(encoding=encoding)}"), 400)


@pytest.mark.parametrize(
    "body", [b'{"text": "\xff"}', codecs.BOM_UTF16_LE + BODY.encode(), b'{"text": NaN}', b'{"x": 1e400}', b"1" * 5000]
)
def test_a_body_that_is_not_json_is_400(app: Flask, body: bytes) -> None:
    assert_problem(post(app, body), 400)


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
def test_a_text_that_no_database_holds_is_422_and_named(app: Flask, body: str, field: str) -> None:
    response = post(app, body.encode())
    assert_problem(response, 422)
    assert [error["field"] for error in json.loads(response.text)["errors"]] == [field]


def test_other_characters_are_accepted(app: Flask) -> None:
    text = "\\u0000 \t\x7f\ufffe\U0001f600"
    assert post(app, json.dumps({"text": text}).encode()).text == text


def test_a_path_that_no_database_holds_is_404_and_named(app: Flask) -> None:
    response = app.test_client().get("/texts/a%00b", headers=AUTHORIZED)
    assert_problem(response, 404)
    assert "name" in json.loads(response.text)["detail"]
    assert app.test_client().get("/texts/a%01b", headers=AUTHORIZED).text == "a\x01b"


@pytest.mark.parametrize("cookie", ["", r'q="a\000b"'])
def test_a_query_or_a_cookie_that_no_database_holds_is_422_and_named(app: Flask, cookie: str) -> None:
    client = app.test_client(use_cookies=False)
    query = "" if cookie else "?p=1&q=2&q=a%00b"
    response = client.get(f"/texts/a{query}", headers={**AUTHORIZED, "Cookie": cookie})
    assert_problem(response, 422)
    assert [error["field"] for error in json.loads(response.text)["errors"]] == ["q"]


@pytest.mark.parametrize(("body", "status"), [(b"", 200), (b"{}", 200), (b"x", 400), (b"[]", 400)])
def test_a_request_that_needs_no_body_may_have_an_object(app: Flask, body: bytes, status: int) -> None:
    response = app.test_client().delete("/texts/a", data=body, content_type="application/json", headers=AUTHORIZED)
    assert response.status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"", None, 200),
        (b"", "application/json", 200),
        (b"", "application/x-www-form-urlencoded", 200),  # as `curl --data ""` sends it
        (b"{}", "application/json", 200),
        (b"{}", None, 415),
        (b"a=1", "application/x-www-form-urlencoded", 415),
        (b"[]", "application/json", 400),
        (b'{"reason": "x", "all": 1}', "application/json", 422),
        (b'{"\\ud800": 1}', "application/json", 422),
    ],
)
def test_a_route_without_a_body_takes_none_or_an_empty_object(
    app: Flask, method: str, body: bytes, content_type: str | None, status: int
) -> None:
    sent: dict[str, Any] = {"data": body, "content_type": content_type, "headers": AUTHORIZED}
    response = app.test_client().open("/texts/a/read", method=method, **sent)
    assert response.status_code == status
    if b"reason" in body:
        assert [error["field"] for error in json.loads(response.text)["errors"]] == ["reason", "all"]


def test_a_route_with_a_body_needs_one(app: Flask) -> None:
    assert_problem(app.test_client().post(PATH, headers=AUTHORIZED), 415)
    assert_problem(post(app, b""), 400)
    assert_problem(post(app, b"{}"), 422)


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/nowhere", 404), ("DELETE", "/healthz", 405)])
def test_a_request_without_a_route_is_refused_whatever_its_body(
    app: Flask, method: str, path: str, status: int
) -> None:
    response = app.test_client().open(path, method=method, json={"field": 1}, headers=AUTHORIZED)
    assert_problem(response, status)


def test_a_response_that_is_not_json_is_500(app: Flask) -> None:
    assert_problem(app.test_client().get("/infinity", headers=AUTHORIZED), 500)


@pytest.mark.parametrize(
    ("error", "status", "type_"),
    [
        (OutOfStock("none left"), 409, "/problems/out-of-stock"),
        (KeyReused(), 409, "/problems/idempotency-key-reused"),
        (NotFound("nothing here"), 404, "about:blank"),
        (RuntimeError("a bug"), 500, "about:blank"),
    ],
)
def test_an_exception_becomes_the_problem_that_is_declared_for_it(
    settings: Settings, error: Exception, status: int, type_: str
) -> None:
    api = APIBlueprint("failing", __name__)

    @api.get("/fail")
    def fail() -> Response:
        raise error

    refusals: dict[type[Exception], Kind] = {
        OutOfStock: Kind(HTTPStatus.CONFLICT, "/problems/out-of-stock", "Out of stock")
    }
    app = make_app(settings, make_engine(settings), Metrics(), title="Any", apis=[api], refusals=refusals)
    response = app.test_client().get("/fail", headers=AUTHORIZED)
    assert_problem(response, status)
    assert json.loads(response.text)["type"] == type_


@pytest.mark.parametrize("name", ["", "service.app", ":create_app", "service.app:", "service.app:create_app()"])
def test_a_service_must_be_named_by_module_and_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / project.FILE).write_text(f'[tool.outbox]\nservice = "{name}"\n')
    monkeypatch.setenv(project.VARIABLE, str(tmp_path))
    with raises("project-wrong", "module:function"):
        serve.main([], standalone_mode=False)


def assert_problem(response: TestResponse, status: int) -> None:
    assert response.status_code == status, response.text
    assert response.content_type == "application/problem+json"
    assert json.loads(response.text)["status"] == status
