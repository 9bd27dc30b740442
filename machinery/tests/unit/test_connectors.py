"""The connectors' files: where the outbox's routes, and where two must not meet. And a connector as managed services
take it: MSK Connect's requests are checked against the model of Amazon's SDK.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import re2
from botocore.validate import ParamValidator

from outbox.base import project
from outbox.base.settings import DatabaseUrl, Settings, load
from outbox.events import catalog
from outbox.relay import connectors, managed
from outbox.relay.connectors import Config
from outbox_lab.testing.command import outbox
from outbox_lab.testing.failures import raises
from tests.support import suite
from tests.support.declared import declare, work_for


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(tmp_path, environment=False, connector="mine", topic_prefix="shop")


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a project that declares no event yet."""
    return work_for(tmp_path / "project", monkeypatch)


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A folder with our file of the outbox, and that of a connector which captures a table."""
    ours = json.loads((suite.DOMAIN / "connect" / "outbox.json").read_text())
    captured = {name: value for name, value in ours.items() if not name.startswith("transforms")}
    for name in ("topic.prefix", "slot.name", "offsets.storage.topic"):
        captured[name] = captured[name].replace("${settings:connector}", "${settings:connector}_orders")
    captured |= {"publication.name": "${settings:connector}_orders", "table.include.list": "public.orders"}
    for kind, config in {"outbox": ours, "orders": captured}.items():
        (tmp_path / f"{kind}.json").write_text(json.dumps(config))
    monkeypatch.setattr(connectors, "folder", lambda: tmp_path)
    return ["outbox", "orders"]


@pytest.mark.parametrize("name", ["publication.name", "table.include.list"])
def test_the_outbox_is_the_one_that_migrations_make(settings: Settings, two: list[str], name: str) -> None:
    """No command makes another one: its file has to be corrected."""
    file = connectors.folder() / f"{two[0]}.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {name: "app.events"}))
    with raises("connector-wrong", f"{name} is app.events", f'"{name}": "{written[name]}"'):
        connectors.load(settings)


def test_the_topics_of_a_connector_and_only_the_outbox_has_markers(
    settings: Settings, events: Path, two: list[str]
) -> None:
    declare(events, "item")
    declare(events, "order", partitions=2)
    outbox, orders = connectors.every(settings)
    assert [outbox.kind, orders.kind] == two, "the outbox comes first"
    assert (orders.table, orders.topic) == (("public", "orders"), "mine_orders.public.orders")
    assert orders.command("apply") == "outbox connect apply orders"
    assert outbox.topics == ("shop.item", "shop.order")
    assert [(spec.name, spec.partitions) for spec in connectors.topic_specs(settings, outbox)] == [
        ("shop.item", settings.topic_partitions),
        ("shop.order", 2),
        ("mine.offsets", 1),
        ("mine.markers", 1),
    ]
    assert [spec.name for spec in connectors.topic_specs(settings, orders)] == [orders.topic, "mine_orders.offsets"]


# Routing ----------------------------------------------------------------------------------------------------------


MARKERS = {"prune-markers": (r"shop\.mine\.markers", "mine.markers")}


def routers(config: Config) -> dict[str, tuple[str, ...]]:
    """Regex and replacement of each router, by its alias."""
    aliases = [alias for alias in config["transforms"].split(",") if alias != "outbox"]
    assert all(config[f"transforms.{alias}.type"] == connectors.ROUTER for alias in aliases)
    options = ("regex", "replacement")
    return {alias: tuple(config[f"transforms.{alias}.{option}"] for option in options) for alias in aliases}


def test_a_topic_of_its_own_gets_a_router(settings: Settings, events: Path) -> None:
    declare(events, "item")
    declare(events, "order", topic="Sales")
    declare(events, "return", "returned", topic="shop.item")
    declare(events, "Bill", topic="shop.Bill")
    connector = connectors.load(settings)
    assert connector.topics == ("shop.Bill", "shop.item", "Sales")
    assert routers(connector.config) == {
        "topic-of-order": (r"shop\.order", "Sales"),
        "topic-of-return": (r"shop\.return", "shop.item"),
        **MARKERS,
    }
    names = ("item", "order", "Order", "unknown")
    assert [connectors.topic_of(connector.config, name) for name in names] == [
        *("shop.item", "Sales", "shop.Order", "shop.unknown")
    ]
    earlier = {**connector.config, connectors.REPLACEMENT: "all.events"}
    assert connectors.topic_of(earlier, "item") == "all.events"


@pytest.mark.parametrize("kind", connectors.kinds())
def test_every_expression_of_a_transform_is_one_of_re2(settings: Settings, kind: str) -> None:
    config = connectors.transforms(connectors.load(settings, kind).config)
    expressions = [value for name, value in config.items() if name.endswith((".regex", ".pattern"))]
    assert [re2.compile(one).pattern for one in expressions] == expressions
    assert not any("(?<" in one for one in expressions), "RE2/J learned groups named as in Java in 1.8 only"
    assert bool(expressions) is (kind == "outbox")


def test_transforms_of_ones_own_stay(settings: Settings, events: Path) -> None:
    declare(events, "order", topic="Sales")
    config = {
        "transforms": "outbox,mask",
        connectors.REPLACEMENT: "shop.${routedByValue}",
        "transforms.mask.type": "Mask",
    }
    added = connectors.add_routers(config, catalog.of_project(settings), settings.markers_topic)
    assert added["transforms"] == "outbox,mask,topic-of-order,prune-markers"
    assert added["transforms.mask.type"] == "Mask"
    assert connectors.transforms({**added, "tasks.max": "1"}) == added


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("aggregate", "options", "what"),
    [
        ("offsets", {}, "the connector's offsets"),
        ("markers", {}, "the markers of `outbox prune`"),
        ("markers", {"topic": "mine.mine.markers"}, "renamed to that of the markers"),
        ("item", {"topic": "outbox.connect.offsets"}, "the worker's offsets"),
        ("item", {"topic": "mine_orders.public.orders"}, "table orders's"),
        ("item", {"topic": "mine_orders.offsets"}, "connector mine_orders's offsets"),
    ],
)
def test_a_topic_that_something_else_writes_is_refused(
    settings: Settings, events: Path, aggregate: str, options: dict[str, str], what: str
) -> None:
    declare(events, aggregate, **options)
    with raises("topic-taken", what):
        connectors.load(settings.replace(topic_prefix="mine"))


def test_a_topic_that_the_router_of_another_aggregate_renames_is_refused(settings: Settings, events: Path) -> None:
    declare(events, "bill", topic="shop.order")
    declare(events, "order", topic="shop.orders")
    with raises("topic-taken", "shop.order of aggregate bill", "shop.orders"):
        connectors.load(settings)


# CloudEvents ------------------------------------------------------------------------------------------------------


def name_source(events: Path, source: str) -> None:
    """Let the project name the source of its events."""
    file = events.parent / project.FILE
    file.write_text(f"{file.read_text()}cloudevents-source = {json.dumps(source)}\n")
    project.load.cache_clear()


@pytest.mark.parametrize("source", ["/shop?a=1", '/"shop"', "${settings:connector}", "1.0"])
def test_source_that_is_no_uri_is_refused(settings: Settings, events: Path, source: str) -> None:
    declare(events, "item")
    name_source(events, source)
    with raises("project-wrong", "cloudevents-source"):
        connectors.load(settings)


# Managed services -----------------------------------------------------------------------------------------------------


REFERENCE = "${secretsmanager:orders-cdc:password}"
AUTHORITY = "${s3import:eu-central-1:bucket/ca.pem}"


@pytest.fixture
def cloud(tmp_path: Path) -> Settings:
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


def msk_connect(cloud: Settings) -> dict[str, Any]:
    return managed.msk_connect(cloud, connectors.load(cloud))


def properties(request: dict[str, Any]) -> dict[str, str]:
    text = base64.b64decode(request["workerConfiguration"]["propertiesFileContent"]).decode()
    return dict(line.split("=", 1) for line in text.splitlines())


def test_both_requests_are_those_of_the_api(cloud: Settings) -> None:
    made = msk_connect(cloud)
    require_accepted("CreateWorkerConfiguration", made["workerConfiguration"])
    require_accepted("CreateConnector", made["connector"])
    with pytest.raises(AssertionError, match="Missing required parameter"):
        require_accepted("CreateConnector", {**made["connector"]["kafkaCluster"]})
    for protocol, login, encryption in [("SASL_SSL", "IAM", "TLS"), ("SSL", "NONE", "TLS")]:
        made = msk_connect(cloud.replace(kafka_security_protocol=protocol))["connector"]
        assert made["kafkaClusterClientAuthentication"] == {"authenticationType": login}
        assert made["kafkaClusterEncryptionInTransit"] == {"encryptionType": encryption}


@pytest.mark.parametrize("exactly_once", [True, False])
def test_worker_and_connector_agree_on_exactly_once(cloud: Settings, exactly_once: bool) -> None:
    made = msk_connect(cloud.replace(exactly_once=exactly_once))
    assert (properties(made).get("exactly.once.source.support") == "enabled") is exactly_once
    wanted = "required" if exactly_once else "requested"
    assert made["connector"]["connectorConfiguration"]["exactly.once.support"] == wanted


def test_secrets_are_references_to_a_provider_of_the_worker(cloud: Settings) -> None:
    made = msk_connect(cloud)
    config = made["connector"]["connectorConfiguration"]
    assert (config["database.password"], config["database.sslrootcert"]) == (REFERENCE, AUTHORITY)
    assert properties(made)["config.providers"] == "secretsmanager"
    other = cloud.replace(connect_source_db_password_reference="${vault:orders:password}")
    assert "config.providers.vault.class" in properties(msk_connect(other))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"connect_source_db_password_reference": None}, "password-reference-missing"),
        ({"source_db_url": DatabaseUrl(sslrootcert=Path("/ca.pem")), "connect_source_db_url": None}, "cafile-missing"),
        ({"kafka_sasl_mechanism": "SCRAM-SHA-512"}, "login-not-offered"),
    ],
)
def test_what_msk_connect_does_not_have_is_refused(cloud: Settings, changes: dict[str, Any], code: str) -> None:
    with raises(code):
        msk_connect(cloud.replace(**changes))


def test_confluents_connector_routes_as_ours_and_says_what_it_lacks(cloud: Settings) -> None:
    ours = connectors.load(cloud)
    config, left_out = managed.confluent_cloud(cloud, ours)
    assert config["connector.class"] == "PostgresCdcSourceV2"
    assert config["database.password"] == f"<password of {cloud.source_db_role_prefix}_cdc>"
    assert {config[f"transforms.{alias}.type"] for alias in config["transforms"].split(",")[1:]} == {
        "io.confluent.connect.cloud.transforms.TopicRegexRouter"
    }
    events = ("item", cloud.markers_topic)
    assert [connectors.topic_of(config, name) for name in events] == [
        connectors.topic_of(ours.config, name) for name in events
    ]
    assert {"exactly.once.support", "offsets.storage.topic", "snapshot.select.statement.overrides"} <= {*left_out}
    assert {*config}.isdisjoint(left_out)


def test_the_command_prints_json_and_no_secret(cloud: Settings, tmp_path: Path) -> None:
    variables = {**cloud.as_env(), "OUTBOX_SOURCE_DB_CDC_PASSWORD": "hush"}
    for service in ("msk-connect", "confluent-cloud"):
        done = outbox("connect", "render", "--for", service, home=tmp_path, **variables)
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)
        assert "hush" not in done.stdout + done.stderr
    assert "exactly.once.support" in done.stderr
