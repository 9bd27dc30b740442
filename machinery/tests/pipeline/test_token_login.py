"""A broker that takes tokens of OpenID Connect, and the server that issues them: how a command logs in, and the one
line that each wrong setting gets.
"""

from __future__ import annotations

import base64
import json
import os
import socketserver
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest

from outbox.audit import doctor
from outbox.audit.check import check
from outbox.base.errors import Failure
from outbox.base.settings import Secret, Settings, load
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.spec import TopicSpec
from outbox.migrations.migrate import migrate
from outbox.relay import lifecycle
from outbox_lab.stack import ports
from outbox_lab.stack.command import SinkProcess
from outbox_lab.stack.connect import Connect
from outbox_lab.testing.failures import raises
from outbox_lab.testing.homes import Homes
from tests.support.outbox_rows import ids, insert, row
from tests.support.secured import (
    OTHER_SCOPE,
    Certificates,
    TokenKafka,
    TokenServer,
    running,
    token_servers,
    token_settings,
)
from tests.support.sink_driver import Database

TOPIC = "events"


@dataclass(frozen=True)
class Login:
    settings: Settings
    tokens: TokenServer
    certificates: Certificates


@pytest.fixture(scope="module")
def broker(homes: Homes) -> Iterator[Login]:
    home = homes.new("tokens")
    certificates = Certificates(home)
    settings, tokens = token_settings(home, certificates)
    with running(tokens, TokenKafka(settings, certificates, tokens)):
        topics.create(settings, [TopicSpec(TOPIC, 1, {})])
        yield Login(settings, tokens, certificates)


@pytest.fixture
def login(broker: Login) -> Iterator[Login]:
    """The token server as it is by default, whatever a test did to it."""
    yield broker
    broker.tokens.stop()
    broker.tokens.ahead_s, broker.tokens.lifetime_s = 0, 3600
    broker.tokens.start()


@pytest.mark.parametrize(
    ("name", "value", "code", "remedy"),
    [
        ("password", Secret("not-it"), "kafka-login-refused", "PASSWORD"),
        ("username", "nobody", "kafka-login-refused", "USERNAME"),
        ("token_scope", "no.such", "kafka-login-refused", "SCOPE"),
        ("token_scope", OTHER_SCOPE, "kafka-login-refused", "audience"),
        ("cafile", "OTHER", "kafka-tls", "CAFILE"),
        ("token_url", "URL/none", "token-server-unavailable", "URL"),
        ("token_url", "https://no.such.host.invalid/", "token-server-unavailable", "URL"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(
    login: Login, name: str, value: str | Secret, code: str, remedy: str
) -> None:
    if isinstance(value, str):
        value = value.replace("OTHER", str(login.certificates.other)).replace("URL", login.tokens.url)
    settings = login.settings.replace(**{f"kafka_{name}": value})
    with pytest.raises(Failure) as caught:
        topics.describe(settings, TOPIC)
    assert caught.value.code == code
    assert remedy in (caught.value.remedy or "")
    assert settings.kafka_password.get_secret_value() not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_token_server_with_a_late_clock_is_named(login: Login) -> None:
    login.tokens.ahead_s = -2 * login.tokens.lifetime_s
    with raises("token-expired", login.tokens.url, "clock"):
        topics.describe(login.settings, TOPIC)
    login.tokens.ahead_s = 2 * login.tokens.lifetime_s
    assert topics.describe(login.settings, TOPIC).name == TOPIC, "nobody compares when it was issued"


# Amazon MSK's logins by IAM, with credentials that are made up: no cluster of Amazon's was in reach ---------------


REGION, KEY_ID, SECRET = "eu-central-1", "AKIDMADEUP", "made-up-secret"


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Listener, Settings]]:
    for name, value in (("REGION", REGION), ("ACCESS_KEY_ID", KEY_ID), ("SECRET_ACCESS_KEY", SECRET)):
        monkeypatch.setenv(f"AWS_{name}", value)
    certificates = Certificates(tmp_path)
    with listening(certificates) as found:
        login = {"security_protocol": "SASL_SSL", "sasl_mechanism": "AWS_MSK_IAM", "cafile": certificates.authority}
        of_kafka = {f"kafka_{name}": value for name, value in {"bootstrap": found.bootstrap, **login}.items()}
        yield found, load(tmp_path, environment=False, **of_kafka)


def test_a_client_signs_a_token_and_sends_it(listener: tuple[Listener, Settings]) -> None:
    found, settings = listener
    with raises("kafka-login-refused", REFUSAL, "kafka-cluster:Connect"):
        topics.describe(settings, "any")
    (mechanism, message), *_ = found.logins
    assert mechanism == "OAUTHBEARER"
    token = message.decode().partition("auth=Bearer ")[2].partition("\x01")[0]
    signed = urlsplit(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode())
    asked = parse_qs(signed.query)
    assert signed.netloc == f"kafka.{REGION}.amazonaws.com"
    assert asked["Action"] == ["kafka-cluster:Connect"]
    assert asked["X-Amz-Credential"][0].startswith(f"{KEY_ID}/")
    assert SECRET not in signed.query


READ = """
from outbox.base.settings import load
from outbox.kafka.clients import spark_options
from outbox.sink.spark import session

settings = load()
spark = session.session(settings)
spark.read.format("kafka").options(subscribe="any", **spark_options(settings)).load().count()
"""


def test_sparks_reader_logs_in_by_the_module_of_its_jars(listener: tuple[Listener, Settings]) -> None:
    found, settings = listener
    own = {**os.environ, **settings.as_env(), "OUTBOX_DOTENV": os.devnull}
    done = subprocess.run([sys.executable, "-c", READ], env=own, capture_output=True, text=True, check=False)
    assert REFUSAL in done.stderr
    assert SECRET not in done.stdout + done.stderr
    (mechanism, message), *_ = found.logins
    assert mechanism == "AWS_MSK_IAM"
    signed = json.loads(message)
    assert signed["action"] == "kafka-cluster:Connect"
    assert signed["x-amz-credential"].startswith(f"{KEY_ID}/")
    assert f"/{REGION}/kafka-cluster/" in signed["x-amz-credential"]
    assert SECRET not in message.decode()


# A listener that speaks as much of Kafka's protocol as a login needs, writes the login down, and refuses it -------


API_VERSIONS, HANDSHAKE, AUTHENTICATE = 18, 17, 36
OFFERED = {3: (0, 1), HANDSHAKE: (0, 1), AUTHENTICATE: (0, 0), API_VERSIONS: (0, 0)}
UNSUPPORTED_VERSION, AUTHENTICATION_FAILED = 35, 58
REFUSAL = "this listener takes nobody"


@dataclass
class Listener:
    """What clients have sent: mechanisms, and the first message of each."""

    bootstrap: str
    logins: list[tuple[str, bytes]] = field(default_factory=list)


@contextmanager
def listening(certificates: Certificates) -> Iterator[Listener]:
    """A listener with TLS on a free port of loopback."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), context.wrap_socket(self.request, server_side=True) as client:
                _talk(client.makefile("rwb"), seen.logins)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server((ports.LOOPBACK, 0), Handler) as server:
        seen = Listener(f"{ports.LOOPBACK}:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield seen
        finally:
            server.shutdown()


def _talk(stream: Any, logins: list[tuple[str, bytes]]) -> None:
    """Answer the requests of a client until it hangs up."""
    mechanism = ""
    while size := stream.read(4):
        request = stream.read(*struct.unpack(">i", size))
        key, version, correlation, name_length = struct.unpack(">hhih", request[:10])
        body = request[10 + max(0, name_length) :]
        if key == API_VERSIONS:  # of a later version it is refused in the format of the first one
            ranges = b"".join(struct.pack(">hhh", api, *versions) for api, versions in OFFERED.items())
            answer = struct.pack(">hi", UNSUPPORTED_VERSION if version else 0, len(OFFERED)) + ranges
        elif key == HANDSHAKE:
            mechanism = body[2:].decode()
            answer = struct.pack(">hi", 0, 1) + _text(mechanism)
        else:
            logins.append((mechanism, body[4:]))
            answer = struct.pack(">h", AUTHENTICATION_FAILED) + _text(REFUSAL) + struct.pack(">i", 0)
        stream.write(struct.pack(">ii", len(answer) + 4, correlation) + answer)
        stream.flush()


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


# The whole chain, with short-lived tokens ---------------------------------------------------------------------------


AWAY = "token-server-unavailable"


@pytest.mark.recovery
def test_chain_outlives_its_tokens_and_a_token_server_that_is_away(homes: Homes) -> None:
    with token_servers(homes.new("tokens")) as (secured, tokens, connect):
        tokens.lifetime_s, settings = 10, secured.settings
        migrate(settings)
        lifecycle.apply(settings)
        sink = SinkProcess("sink", settings, ["sink", "dedup"])
        sink.start()
        try:
            applied = 0
            for issued in (12, 24):  # clients of the broker, of the worker and of the sink ask again and again
                wait_for("other tokens", partial(lambda count: len(tokens.issued) > count, issued), timeout_s=90)
                applied += follow(settings)
            assert "sink failed" not in sink.log_file.read_text()

            tokens.stop()
            insert(settings, row(), row())
            wait_for("the sink to say so", lambda: AWAY in sink.log_file.read_text(), timeout_s=120)
            assert [one.code for one in doctor.examine(settings, "kafka")] == [AWAY]
            insert(settings, row())
            tokens.start()
            wait_for("all events in the sink", lambda: have_applied(settings, connect, applied + 3), timeout_s=150)
            follow(settings)
            said = sink.log_file.read_text()
            logs = [said, *(file.read_text() for file in (settings.home.parent / "logs").glob("*.log"))]
            arguments = [*command_lines(sink)]
            assert any("java" in line for line in arguments)
            assert not [text for secret in secured.secrets() for text in (*logs, *arguments) if secret in text]
        finally:
            sink.stop()
        assert sorted(Database(settings).totals().values()) == [5] * len(ids(settings)), "each once"
        report = check(settings)
        codes = {finding.code for finding in report.findings} - {"sink-drift"}  # rows of events without a service's
        assert (codes, report.settled) == (set(), True)


def command_lines(sink: SinkProcess) -> Iterator[str]:
    """The command lines of the sink and of its descendants that run now."""
    for process in sink.processes():
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):  # it has just ended
                yield " ".join(one.cmdline())


def have_applied(settings: Settings, connect: Connect, events: int) -> bool:
    """Whether the sink has applied so many events. Before that, start a worker that has ended, as its supervisor would,
    and a task that has failed, as `outbox monitor` would.
    """
    if not connect.processes():
        connect.start()
    with suppress(Failure):  # the worker joins its group
        if lifecycle.status(settings).error:
            lifecycle.apply(settings)
    return Database(settings).applied() == events


def follow(settings: Settings) -> int:
    """Write two events, and wait until the sink has applied all."""
    insert(settings, row(), row())
    wait_for("both", lambda: Database(settings).applied() == len(ids(settings)), timeout_s=60)
    return 2
