"""The generic part of a service, without a database: bodies, and the problems that a service declares."""

from __future__ import annotations

import codecs
import json
from http import HTTPStatus
from pathlib import Path

import pytest
from flask import Flask, Response
from flask_openapi3.blueprint import APIBlueprint
from werkzeug.exceptions import NotFound
from werkzeug.test import TestResponse

from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.commands import serve
from outbox.http.app import make_app
from outbox.http.database import make_engine
from outbox.http.idempotency import KeyReused
from outbox.http.metrics import Metrics
from outbox.http.problems import Kind
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
    "body", [b'{"text": "\xff"}', codecs.BOM_UTF16_LE + BODY.encode(), b'{"text": NaN}', b"1" * 5000]
)
def test_a_body_that_is_not_json_is_400(app: Flask, body: bytes) -> None:
    assert_problem(post(app, body), 400)


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


def test_a_service_without_a_token_refuses_to_start(settings: Settings) -> None:
    with pytest.raises(Failure) as failed:
        create_app(settings.model_copy(update={"service_token": type(settings.service_token)("")}))
    assert failed.value.code == "service-token-missing"


@pytest.mark.parametrize("name", ["", "service.app", ":create_app", "service.app:", "service.app:create_app()"])
def test_a_service_must_be_named_by_module_and_function(name: str) -> None:
    with pytest.raises(Failure) as failed:
        serve._app(name)
    assert failed.value.code == "service-name-invalid"


def assert_problem(response: TestResponse, status: int) -> None:
    assert response.status_code == status, response.text
    assert response.content_type == "application/problem+json"
    assert json.loads(response.text)["status"] == status
