"""A broker that takes tokens of OpenID Connect, and the server that issues them: how a command logs in, and the one
line that each wrong setting gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from confluent_kafka import Producer

from outbox.base.errors import Failure
from outbox.base.settings import Secret, Settings
from outbox.kafka import records, topics
from outbox.kafka.clients import client_config
from outbox.kafka.spec import TopicSpec
from outbox_lab.stack.kafka import CLIENT
from outbox_lab.testing.failures import raises
from outbox_lab.testing.homes import Homes
from tests.support.secured import Certificates, TokenKafka, running, token_settings
from tests.support.token_server import OTHER_SCOPE, TokenServer

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


def test_a_client_logs_in_as_the_client_of_its_token(login: Login) -> None:
    login.tokens.issued.clear()
    producer = Producer(client_config(login.settings))
    producer.produce(TOPIC, b"one")
    assert producer.flush(30) == 0
    (record,) = records.read(login.settings, TOPIC, topics.watermarks(login.settings, TOPIC))
    assert record.value() == b"one"
    assert {*login.tokens.issued} == {CLIENT}


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
