"""Amazon MSK's logins by IAM, with credentials that are made up: what the client sends, and the line of a refusal; that
of a token which the brokers refuse, too.

No cluster of Amazon's was in reach. The listener of `tests.support.login_listener` takes its place.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from outbox.base.settings import Settings, load
from outbox.kafka import topics
from outbox_lab.testing.failures import raises
from tests.support.login_listener import REFUSAL, Listener, listening
from tests.support.secured import Certificates, running, token_settings

REGION, KEY_ID, SECRET = "eu-central-1", "AKIDMADEUP", "made-up-secret"


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[Listener, Settings]]:
    certificates = Certificates(tmp_path)
    with listening(certificates) as found:
        yield (
            found,
            load(
                tmp_path,
                environment=False,
                kafka_bootstrap=found.bootstrap,
                kafka_security_protocol="SASL_SSL",
                kafka_sasl_mechanism="AWS_MSK_IAM",
                kafka_cafile=certificates.authority,
            ),
        )


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", REGION)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.mark.usefixtures("credentials")
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


@pytest.mark.usefixtures("credentials")
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


def test_no_credentials_are_one_line(
    listener: tuple[Listener, Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_REGION", REGION)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    found, settings = listener
    with raises("kafka-login-refused", "credentials"):
        topics.describe(settings, "any")
    assert found.logins == []


def test_brokers_that_refuse_a_token_are_told_from_its_server(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    settings, tokens = token_settings(tmp_path, certificates)
    with running(tokens), listening(certificates) as found:
        settings = settings.replace(kafka_bootstrap=found.bootstrap)
        with raises("kafka-login-refused", found.bootstrap, tokens.url, REFUSAL, "audience"):
            topics.describe(settings, "any")


def test_a_cluster_whose_name_does_not_say_its_region_is_one_line(
    listener: tuple[Listener, Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    with raises("kafka-login-refused", "AWS_REGION"):
        topics.describe(listener[1], "any")
