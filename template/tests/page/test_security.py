"""Who may ask the page's server for what."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient

from demo.page.app import Desk, create_app
from demo.page.hub import Hub
from demo.page.security import Guard
from template.tests.paths import ROOT

PORT, TOKEN = 8090, "the-token"
HERE = f"http://127.0.0.1:{PORT}"
STATIC = ROOT / "demo" / "page" / "static"


class Recorder(Desk):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_free = True

    def act(self, name: str) -> bool:
        if name != "transfer":
            raise KeyError(name)
        self.asked.append(name)
        return self.is_free

    def lesson(self, verb: str) -> bool:
        self.asked.append(verb)
        return self.is_free

    def look_up(self, event_id: str) -> dict[str, Any] | None:
        return {"row": event_id, "records": []} if event_id == "known" else None


@pytest.fixture
def desk() -> Recorder:
    return Recorder()


@pytest.fixture
def app(desk: Recorder) -> Flask:
    hub = Hub({"lines": 3}, {"events": 3})
    hub.publish({"slot": {"lag_bytes": 1}})
    hub.close()  # a stream ends at once
    return create_app(hub, desk, Guard(TOKEN))


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    """A page that has no token."""
    return app.test_client()


@pytest.fixture
def admitted(client: FlaskClient) -> FlaskClient:
    """The page that the terminal's address has opened."""
    client.environ_base["HTTP_AUTHORIZATION"] = f"Bearer {TOKEN}"
    return client


def post(client: FlaskClient, path: str, body: object) -> int:
    return client.post(path, json=body, base_url=HERE).status_code


@pytest.mark.parametrize("path", ["/api/stream", "/api/events/known", "/api/nothing"])
def test_nothing_of_the_chain_is_read_without_the_token(client: FlaskClient, path: str) -> None:
    assert client.get(path, base_url=HERE).status_code == HTTPStatus.UNAUTHORIZED


def test_the_page_itself_is_open_and_holds_nothing_secret(client: FlaskClient) -> None:
    with client.get("/", base_url=HERE) as response:
        assert response.status_code == HTTPStatus.OK
        assert TOKEN.encode() not in response.data


@pytest.mark.parametrize(
    "sent", ["", "Bearer", "Bearer ", "Bearer other", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN} x", "Bearer \xff"]
)
def test_a_wrong_token_is_refused(client: FlaskClient, desk: Recorder, sent: str) -> None:
    client.environ_base["HTTP_AUTHORIZATION"] = sent
    assert client.get("/api/stream", base_url=HERE).status_code == HTTPStatus.UNAUTHORIZED
    assert post(client, "/api/act", {"action": "transfer"}) == HTTPStatus.UNAUTHORIZED
    assert desk.asked == []


def test_what_a_browser_sends_to_other_ports_opens_nothing(client: FlaskClient) -> None:
    page = {"Authorization": f"Bearer {TOKEN}", "Origin": HERE}
    client.post("/session", json={"token": TOKEN}, headers=page, base_url=HERE)
    for path in ("/", "/static/main.js", "/api/stream", "/api/events/known"):
        client.get(path, headers=page, base_url=HERE).close()
    # The cookies of a host go to each of its ports, and a program that listens there may send them on.
    assert client.get("/api/stream", base_url=HERE).status_code == HTTPStatus.UNAUTHORIZED


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", f"127.0.0.1.evil.example:{PORT}"]
)
def test_another_host_name_is_refused(admitted: FlaskClient, host: str) -> None:
    for path in ("/", "/api/stream", "/static/main.js"):
        assert admitted.get(path, base_url=f"http://{host}").status_code == HTTPStatus.MISDIRECTED_REQUEST


def test_what_is_allowed_is_done_and_what_must_wait_is_refused(admitted: FlaskClient, desk: Recorder) -> None:
    assert post(admitted, "/api/act", {"action": "transfer"}) == HTTPStatus.ACCEPTED
    assert post(admitted, "/api/act", {"action": "nothing"}) == HTTPStatus.NOT_FOUND
    assert post(admitted, "/api/act", ["transfer"]) == HTTPStatus.NOT_FOUND
    desk.is_free = False
    assert post(admitted, "/api/lesson", {"verb": "play"}) == HTTPStatus.CONFLICT
    assert desk.asked == ["transfer", "play"]


def test_an_event_is_looked_up(admitted: FlaskClient) -> None:
    assert admitted.get("/api/events/known", base_url=HERE).json == {"row": "known", "records": []}
    assert admitted.get("/api/events/other", base_url=HERE).status_code == HTTPStatus.NOT_FOUND


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/api/stream", "/nothing"])
def test_every_response_has_the_headers(client: FlaskClient, path: str) -> None:
    with client.get(path, base_url=HERE) as response:
        headers = response.headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    policy = dict(one.partition(" ")[::2] for one in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"


def test_the_page_needs_no_other_host_and_writes_no_html() -> None:
    files = [file for file in STATIC.iterdir() if file.suffix in {".html", ".js", ".css"}]
    assert len(files) > 10
    for file in files:
        text = file.read_text()
        assert not re.search(r"""(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w-]+\.[\w.-]+/""", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text), (
            file.name
        )
