"""Answers of the API without its database: every refusal of a request, as application/problem+json."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from outbox import Failure, Settings, load_settings
from werkzeug.test import TestResponse

from service.app import create_app

TOKEN = "secret"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
KEYED = {**AUTHORIZED, "Idempotency-Key": "k"}
SOME_ID = "0b9b4b1e-6f0e-4f0c-8d3c-1f2e3d4c5b6a"
BODY: dict[str, Any] = {"from_account": SOME_ID, "to_account": "1" + SOME_ID[1:], "amount": 1}
BODY_MAX_BYTES = 16 * 1024
READS = ["/accounts/{account_id}", "/transfers/{transfer_id}"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings of a service whose database is unavailable: its port is taken, and nobody listens on it."""
    home: Path = tmp_path_factory.mktemp("home")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield load_settings(home, service_token=TOKEN, source_db_url=f"postgresql://127.0.0.1:{taken.getsockname()[1]}")


@pytest.fixture(scope="module")
def app(settings: Settings) -> Flask:
    return create_app(settings)


def problem(response: TestResponse, status: int) -> dict[str, Any]:
    """The problem that a response is, checked for what all have in common."""
    assert response.status_code == status, response.text
    assert response.content_type == "application/problem+json", response.content_type
    told: dict[str, Any] = json.loads(response.text)
    assert told["status"] == status, told
    assert told["title"], told
    assert told["detail"], told
    return told


def test_a_service_without_a_token_refuses_to_start(settings: Settings) -> None:
    with pytest.raises(Failure) as failed:
        create_app(settings.without_secrets())
    assert failed.value.code == "service-token-missing"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer sécret"},
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/transfers"), ("GET", f"/accounts/{SOME_ID}"), ("GET", "/x")])
def test_no_or_a_wrong_token_is_401(app: Flask, headers: dict[str, str], method: str, path: str) -> None:
    response = app.test_client().open(path, method=method, headers=headers)
    problem(response, 401)
    assert response.headers["WWW-Authenticate"] == "Bearer realm=service"


@pytest.mark.parametrize(
    "body", ["", "{", '{"amount": 1', "[]", '"text"', json.dumps(json.dumps(BODY)), "[" * 10_000, "\xff"]
)
def test_a_body_that_is_no_json_object_is_400(app: Flask, body: str) -> None:
    response = app.test_client().post(
        "/transfers", data=body.encode("latin-1"), headers={**KEYED, "Content-Type": "application/json"}
    )
    problem(response, 400)


@pytest.mark.parametrize("media_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_another_media_type_is_415(app: Flask, media_type: str | None) -> None:
    response = app.test_client().post("/transfers", data=json.dumps(BODY), headers=KEYED, content_type=media_type)
    problem(response, 415)


def test_a_body_too_large_is_413(app: Flask) -> None:
    padded = json.dumps(BODY) + " " * BODY_MAX_BYTES
    problem(app.test_client().post("/transfers", data=padded, headers=KEYED, content_type="application/json"), 413)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"amount": 0}, "amount"),
        ({"amount": -1}, "amount"),
        ({"amount": 2**63}, "amount"),
        ({"amount": 1.5}, "amount"),
        ({"amount": "1"}, "amount"),
        ({"amount": True}, "amount"),
        ({"amount": None}, "amount"),
        ({"from_account": "x"}, "from_account"),
        ({"from_account": 7}, "from_account"),
        ({"to_account": BODY["from_account"]}, "to_account"),
        ({"to_account": BODY["from_account"].upper()}, "to_account"),
        ({"note": "hello"}, "note"),
    ],
)
def test_an_invalid_field_is_422_and_named(app: Flask, change: dict[str, Any], field: str) -> None:
    told = problem(app.test_client().post("/transfers", json={**BODY, **change}, headers=KEYED), 422)
    assert [error["field"] for error in told["errors"]] == [field], told


@pytest.mark.parametrize("key", [None, "a b", "é", "x" * 256])
def test_no_or_an_invalid_idempotency_key_is_422_and_named(app: Flask, key: str | None) -> None:
    headers = AUTHORIZED if key is None else {**AUTHORIZED, "Idempotency-Key": key}
    told = problem(app.test_client().post("/transfers", json=BODY, headers=headers), 422)
    assert [error["field"] for error in told["errors"]] == ["Idempotency-Key"], told


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"currency": "eur"},
        {"currency": "EURO"},
        {"currency": "EUR", "kind": "root"},
        {"currency": "EUR", "label": "x" * 101},
        {"currency": "EUR", "label": None},
        {"currency": "EUR", "label": "a\0b"},
    ],
)
def test_an_invalid_account_is_422(app: Flask, body: dict[str, object]) -> None:
    problem(app.test_client().post("/accounts", json=body, headers=KEYED), 422)


@pytest.mark.parametrize(
    "path", ["/accounts", f"/accounts/{SOME_ID}/freeze", f"/accounts/{SOME_ID}/close", "/transfers"]
)
def test_each_change_needs_an_idempotency_key(app: Flask, path: str) -> None:
    found = problem(app.test_client().post(path, json={}, headers=AUTHORIZED), 422)
    assert "Idempotency-Key" in [error["field"] for error in found["errors"]]


def test_a_closing_takes_no_fields(app: Flask) -> None:
    response = app.test_client().post(f"/accounts/{SOME_ID}/close", json={"reason": "x"}, headers=KEYED)
    assert [error["field"] for error in problem(response, 422)["errors"]] == ["reason"]


@pytest.mark.parametrize("path", ["/", "/nothing", "/accounts/7", "/transfers/x", "/static/x"])
def test_an_unknown_path_is_404(app: Flask, path: str) -> None:
    problem(app.test_client().get(path, headers=AUTHORIZED), 404)


def test_a_wrong_method_is_405_and_the_right_ones_are_named(app: Flask) -> None:
    response = app.test_client().delete("/transfers", headers=AUTHORIZED)
    problem(response, 405)
    assert "POST" in response.headers["Allow"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/transfers", BODY),
        ("POST", "/accounts", {"currency": "EUR"}),
        ("POST", f"/accounts/{SOME_ID}/freeze", {"reason": "x"}),
        ("POST", f"/accounts/{SOME_ID}/close", {}),
        ("GET", f"/accounts/{SOME_ID}", None),
        ("GET", f"/transfers/{SOME_ID}", None),
        ("GET", "/readyz", None),
    ],
)
def test_a_database_that_is_away_is_503_with_a_time_to_retry(
    app: Flask, method: str, path: str, body: dict[str, Any] | None
) -> None:
    response = app.test_client().open(path, method=method, json=body, headers=KEYED)
    problem(response, 503)
    assert int(response.headers["Retry-After"]) > 0


def test_liveness_and_metrics_need_no_database_and_no_token(app: Flask) -> None:
    http = app.test_client()
    assert http.get("/healthz").get_json() == {"status": "ok"}
    assert http.get("/openapi.json").status_code == 200
    http.get("/nothing/in/particular", headers=AUTHORIZED)
    told = http.get("/metrics").text
    assert 'http_request_duration_seconds_count{method="GET",route="unknown",status="404"}' in told
    assert "in/particular" not in told
    for outcome in ("created", "refused", "repeated"):
        assert f'ledger_transfers_total{{outcome="{outcome}"}} 0.0' in told


def test_a_client_that_makes_up_methods_makes_no_metrics(app: Flask) -> None:
    http = app.test_client()
    assert http.open("/transfers", method="BREW", headers=AUTHORIZED).status_code == 405
    told = http.get("/metrics").text
    assert 'method="other"' in told
    assert "BREW" not in told


def test_openapi_names_every_status_and_where_the_token_is_asked(app: Flask) -> None:
    paths = app.test_client().get("/openapi.json").get_json()["paths"]
    found = {
        f"{method.upper()} {path}": set(operation["responses"])
        for path, methods in paths.items()
        for method, operation in methods.items()
    }
    writing = {"201", "400", "401", "413", "415", "422", "500", "503"}
    changing = writing - {"201"} | {"200", "404", "409"}
    assert found == {
        "POST /accounts": writing | {"409"},
        "POST /accounts/{account_id}/freeze": changing,
        "POST /accounts/{account_id}/close": changing,
        "POST /transfers": writing | {"404", "409"},
        **{f"GET {path}": {"200", "401", "404", "500", "503"} for path in READS},
        "GET /healthz": {"200", "500"},
        "GET /readyz": {"200", "500", "503"},
    }
    for path, methods in paths.items():
        for operation in methods.values():
            assert bool(operation.get("security")) == (path not in ("/healthz", "/readyz")), path
            for status, response in operation["responses"].items():
                form = "application/json" if status < "400" else "application/problem+json"
                assert set(response["content"]) == {form}, (path, status)
