"""A connector as managed services take it. MSK Connect's requests are checked against the model of Amazon's SDK."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator

from outbox.base.settings import DatabaseUrl, Settings, load
from outbox.relay import connectors, managed
from outbox_lab.testing.command import outbox
from outbox_lab.testing.failures import raises

REFERENCE = "${secretsmanager:orders-cdc:password}"
AUTHORITY = "${s3import:eu-central-1:bucket/ca.pem}"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(
        tmp_path,
        environment=False,
        connector="mine",
        topic_prefix="shop",
        kafka_bootstrap="b-1.shop.abc.c2.kafka.eu-central-1.amazonaws.com:9098",
        kafka_security_protocol="SASL_SSL",
        kafka_sasl_mechanism="AWS_MSK_IAM",
        connect_source_db_password_reference=REFERENCE,
        source_db_url="postgresql://?sslmode=verify-full",
        connect_source_db_url=f"postgresql://?sslrootcert={AUTHORITY}",
    )


def require_accepted(operation: str, request: dict[str, Any]) -> None:
    """The request has all that the operation requires, with its types, and nothing that it does not know."""
    service = botocore.session.get_session().get_service_model("kafkaconnect")
    report = ParamValidator().validate(request, service.operation_model(operation).input_shape)
    assert not report.has_errors(), report.generate_report()


def msk_connect(settings: Settings) -> dict[str, Any]:
    return managed.msk_connect(settings, connectors.load(settings))


def properties(request: dict[str, Any]) -> dict[str, str]:
    text = base64.b64decode(request["workerConfiguration"]["propertiesFileContent"]).decode()
    return dict(line.split("=", 1) for line in text.splitlines())


def test_both_requests_are_those_of_the_api(settings: Settings) -> None:
    made = msk_connect(settings)
    require_accepted("CreateWorkerConfiguration", made["workerConfiguration"])
    require_accepted("CreateConnector", made["connector"])
    with pytest.raises(AssertionError, match="Missing required parameter"):
        require_accepted("CreateConnector", {**made["connector"]["kafkaCluster"]})
    for protocol, login, encryption in [("SASL_SSL", "IAM", "TLS"), ("SSL", "NONE", "TLS")]:
        made = msk_connect(settings.replace(kafka_security_protocol=protocol))["connector"]
        assert made["kafkaClusterClientAuthentication"] == {"authenticationType": login}
        assert made["kafkaClusterEncryptionInTransit"] == {"encryptionType": encryption}


@pytest.mark.parametrize("exactly_once", [True, False])
def test_worker_and_connector_agree_on_exactly_once(settings: Settings, exactly_once: bool) -> None:
    made = msk_connect(settings.replace(exactly_once=exactly_once))
    assert (properties(made).get("exactly.once.source.support") == "enabled") is exactly_once
    wanted = "required" if exactly_once else "requested"
    assert made["connector"]["connectorConfiguration"]["exactly.once.support"] == wanted


def test_secrets_are_references_to_a_provider_of_the_worker(settings: Settings) -> None:
    made = msk_connect(settings)
    config = made["connector"]["connectorConfiguration"]
    assert (config["database.password"], config["database.sslrootcert"]) == (REFERENCE, AUTHORITY)
    assert properties(made)["config.providers"] == "secretsmanager"
    other = settings.replace(connect_source_db_password_reference="${vault:orders:password}")
    assert "config.providers.vault.class" in properties(msk_connect(other))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"connect_source_db_password_reference": None}, "password-reference-missing"),
        ({"source_db_url": DatabaseUrl(sslrootcert=Path("/ca.pem")), "connect_source_db_url": None}, "cafile-missing"),
        ({"kafka_sasl_mechanism": "SCRAM-SHA-512"}, "login-not-offered"),
    ],
)
def test_what_msk_connect_does_not_have_is_refused(settings: Settings, changes: dict[str, Any], code: str) -> None:
    with raises(code):
        msk_connect(settings.replace(**changes))


def test_confluents_connector_routes_as_ours_and_says_what_it_lacks(settings: Settings) -> None:
    ours = connectors.load(settings)
    config, left_out = managed.confluent_cloud(settings, ours)
    assert config["connector.class"] == "PostgresCdcSourceV2"
    assert config["database.password"] == f"<password of {settings.source_db_role_prefix}_cdc>"
    assert {config[f"transforms.{alias}.type"] for alias in config["transforms"].split(",")[1:]} == {
        "io.confluent.connect.cloud.transforms.TopicRegexRouter"
    }
    events = ("item", settings.markers_topic)
    assert [connectors.topic_of(config, name) for name in events] == [
        connectors.topic_of(ours.config, name) for name in events
    ]
    assert {"exactly.once.support", "offsets.storage.topic", "snapshot.select.statement.overrides"} <= {*left_out}
    assert {*config}.isdisjoint(left_out)


def test_the_command_prints_json_and_no_secret(settings: Settings, tmp_path: Path) -> None:
    variables = {**settings.as_env(), "OUTBOX_SOURCE_DB_CDC_PASSWORD": "hush"}
    for service in ("msk-connect", "confluent-cloud"):
        done = outbox("connect", "render", "--for", service, home=tmp_path, **variables)
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)
        assert "hush" not in done.stdout + done.stderr
    assert "exactly.once.support" in done.stderr
