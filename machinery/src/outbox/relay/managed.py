"""A connector as managed services take it: the two requests of MSK Connect's API, and the configuration of Confluent
Cloud's own connector.

Words in angle brackets are names of the service, which only its user knows. docs/bring-your-own.md says what the
services cannot do. Neither was in reach: names are from their documentation and from public configurations.
"""

from __future__ import annotations

import base64
import re
from typing import Any

from outbox.base.errors import Failure
from outbox.base.settings import MSK_IAM, Settings, SourceRole
from outbox.relay.connectors import ROUTER, Config, Connector

STRING = "org.apache.kafka.connect.storage.StringConverter"
SECRETS = "com.amazonaws.kafka.config.providers.SecretsManagerConfigProvider"
CONNECT_VERSION = "3.7.x"  # the newest of MSK Connect
# Properties of ours that Confluent's connector was seen to have.
CONFLUENT = re.compile(
    r"tasks\.max|database\.(hostname|port|dbname|user|sslmode)|topic\.prefix|table\.include\.list|plugin\.name"
    r"|slot\.name|publication\.(name|autocreate\.mode)|snapshot\.mode|heartbeat\.interval\.ms"
    r"|tombstones\.on\.delete|(transforms|predicates)(\..+)?"
)
TOPIC_ROUTER = "io.confluent.connect.cloud.transforms.TopicRegexRouter"


def msk_connect(settings: Settings, connector: Connector) -> dict[str, Any]:
    """The requests CreateWorkerConfiguration and CreateConnector. Raises Failure if the connector would find no
    password or no CA file there, or if the brokers ask for a login that MSK Connect does not have.
    """
    reference = settings.connect_source_db_password_reference
    if reference is None:
        raise Failure(
            f"MSK Connect has no password file for role {settings.role_name(SourceRole.CDC)}",
            "set OUTBOX_CONNECT_SOURCE_DB_PASSWORD_REFERENCE, for example to ${secretsmanager:orders-cdc:password}",
            code="password-reference-missing",
        )
    own, seen = settings.source_db_url, settings.connect_source_db_url or settings.source_db_url
    if own.sslrootcert is not None and seen.sslrootcert == own.sslrootcert:
        raise Failure(
            f"MSK Connect has no file {own.sslrootcert}",
            "set OUTBOX_CONNECT_SOURCE_DB_URL, for example to "
            "postgresql://?sslrootcert=${s3import:<region>:<bucket>/ca.pem}",
            code="cafile-missing",
        )
    protocol = settings.kafka_security_protocol
    if protocol.startswith("SASL") and settings.kafka_sasl_mechanism != MSK_IAM:
        raise Failure(
            f"MSK Connect does not log in by {settings.kafka_sasl_mechanism}",
            f"set OUTBOX_KAFKA_SASL_MECHANISM={MSK_IAM}, or let it use a listener without a login",
            code="login-not-offered",
        )
    return {
        "workerConfiguration": {
            "name": connector.name,
            "propertiesFileContent": _encoded(_worker(settings, reference)),
        },
        "connector": {
            "connectorName": connector.name,
            "connectorConfiguration": connector.config,
            "kafkaConnectVersion": CONNECT_VERSION,
            "capacity": {"provisionedCapacity": {"mcuCount": 1, "workerCount": 1}},
            "kafkaCluster": {
                "apacheKafkaCluster": {
                    "bootstrapServers": settings.kafka_bootstrap,
                    "vpc": {"securityGroups": ["<security group>"], "subnets": ["<subnet>"]},
                }
            },
            "kafkaClusterClientAuthentication": {"authenticationType": "IAM" if "SASL" in protocol else "NONE"},
            "kafkaClusterEncryptionInTransit": {"encryptionType": "TLS" if "SSL" in protocol else "PLAINTEXT"},
            "plugins": [{"customPlugin": {"customPluginArn": "<ARN of the plugin>", "revision": 1}}],
            "serviceExecutionRoleArn": "<ARN of the role>",
            "workerConfiguration": {"workerConfigurationArn": "<ARN of the worker configuration>", "revision": 1},
        },
    }


def _worker(settings: Settings, reference: str) -> Config:
    """The worker's properties. Its topic of offsets has a name of ours, so that another connector can continue."""
    provider = reference.removeprefix("${").partition(":")[0]
    properties = {
        "key.converter": STRING,
        "value.converter": STRING,
        "offset.storage.topic": settings.connect_offsets_topic,
        "config.providers": provider,
        f"config.providers.{provider}.class": SECRETS,
        f"config.providers.{provider}.param.region": "<region>",
    }
    return properties | ({"exactly.once.source.support": "enabled"} if settings.exactly_once else {})


def _encoded(properties: Config) -> str:
    return base64.b64encode("".join(f"{name}={value}\n" for name, value in properties.items()).encode()).decode()


def confluent_cloud(settings: Settings, connector: Connector) -> tuple[Config, list[str]]:
    """The configuration of PostgresCdcSourceV2, and the properties of ours that it does not have. An event's payload is
    parsed and written again, because the service's converters quote a text.
    """
    ours = connector.config
    kept = {name for name in ours if CONFLUENT.fullmatch(name)}
    config = {
        "name": connector.name,
        "connector.class": "PostgresCdcSourceV2",
        "kafka.auth.mode": "KAFKA_API_KEY",
        "kafka.api.key": "<API key>",
        "kafka.api.secret": "<API secret>",
        "database.password": f"<password of {settings.role_name(SourceRole.CDC)}>",
        "output.key.format": "STRING",
        "output.data.format": "JSON",
        "after.state.only": "false",  # the EventRouter takes an envelope
        **{name: TOPIC_ROUTER if value == ROUTER else value for name, value in ours.items() if name in kept},
    }
    if connector.is_outbox:
        config["transforms.outbox.table.expand.json.payload"] = "true"
    return config, [name for name in ours if name not in config]
