"""`outbox events publish` to what is no registry: each fault is one clear line, and none repeats a secret."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from outbox_lab.events import registry
from tests.support.declared import payload
from tests.support.event_project import Repository

SECRET = "hunter2"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "project")
    made.events.aggregate("order", placed_v1=payload())
    return made


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def line_of(repository: Repository, url: str, code: str, **variables: str) -> str:
    """The one line of a run that must fail with a code."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (registry.USER, registry.TOKEN):
            patch.delenv(name, raising=False)
        done = repository.run("publish", "--registry", url, **variables)
    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout, repository.code) == (1, "", code), line
    assert SECRET not in line
    return line


@pytest.mark.parametrize(
    "url",
    [
        *("registry:8081", "ftp://registry", "http://", "http://a b"),
        *(f"https://ada:{SECRET}@registry", f"https://registry?token={SECRET}"),
    ],
)
def test_url_is_checked_first(repository: Repository, url: str) -> None:
    line_of(repository, url, "registry-url-wrong")


@pytest.mark.parametrize(
    "variables",
    [
        {registry.USER: SECRET},
        {registry.USER: f"ada:{SECRET}", registry.TOKEN: SECRET},
        {registry.TOKEN: f"{SECRET}\nX-Other: 1"},
        {registry.TOKEN: f"{SECRET}ü"},
    ],
)
def test_login_is_checked_first(repository: Repository, silent: str, variables: dict[str, str]) -> None:
    line_of(repository, silent, "registry-login-wrong", **variables)


@pytest.mark.parametrize("host", ["registry.invalid", "[registry", "registry:http", "registry:99999", "*"])
def test_host_that_cannot_be_reached(repository: Repository, host: str) -> None:
    line_of(repository, f"http://{host}", "registry-unavailable")


def test_no_server(repository: Repository) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    assert "refused" in line_of(repository, f"http://127.0.0.1:{free}", "registry-unavailable")


def test_silent_server(repository: Repository, silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REQUEST_TIMEOUT_S", 0.2)
    assert "no answer in 0.2 s" in line_of(repository, silent, "registry-unavailable", **{registry.TOKEN: SECRET})


@contextmanager
def answering(status: int, body: str) -> Iterator[tuple[str, list[str | None]]]:
    """The URL of a server that answers so, and the logins that it gets."""
    logins: list[str | None] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            logins.append(self.headers["Authorization"])
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Location", f"/login?token={SECRET}")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *arguments: object) -> None:
            """Write nothing to stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", logins
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (200, "<html>Log in</html>", "registry-foreign"),
        (200, '["a"]', "registry-foreign"),
        (302, "", "registry-foreign"),
        (404, "nothing here", "registry-foreign"),
        (403, '{"error_code": 40301}', "registry-login-refused"),
        (503, '{"error_code": 50003, "message": "no\\nleader"}', "registry-unavailable"),
    ],
)
def test_answer_that_is_not_expected(repository: Repository, status: int, body: str, code: str) -> None:
    with answering(status, body) as (url, _):
        line = line_of(repository, url, code)
    assert str(status) in line
    assert "no leader" in line or status != 503


@pytest.mark.parametrize(
    ("variables", "header"),
    [
        ({registry.USER: "ada:hunter2"}, f"Basic {base64.b64encode(b'ada:hunter2').decode()}"),
        ({registry.TOKEN: "a-token\n"}, "Bearer a-token"),
        ({}, None),
    ],
    ids=["password", "token", "none"],
)
def test_login_is_sent(repository: Repository, variables: dict[str, str], header: str | None) -> None:
    with answering(200, '{"id": 1}') as (url, logins):
        assert repository.run("publish", "--registry", url, **variables).returncode == 0
    assert logins == [header]


def test_registry_is_required(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCHEMA_REGISTRY_URL", raising=False)
    done = repository.run("publish")
    assert (done.returncode, "SCHEMA_REGISTRY_URL" in done.stderr) == (2, True)


def test_nothing_to_publish(repository: Repository, silent: str) -> None:
    repository.events.aggregate("order", 'key = "id"\npublished = false\n')
    done = repository.run("publish", "--registry", silent)
    assert (done.returncode, done.stderr) == (0, "note: order is left out: published = false\n")
    assert "no event is published" in done.stdout
