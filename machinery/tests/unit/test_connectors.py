"""The connectors' files: what is named after a connector, where the outbox's routes, and where two must not meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import re2

from outbox.base import project
from outbox.base.settings import Settings, load
from outbox.events import catalog
from outbox.relay import connectors
from outbox.relay.connectors import Config
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


@pytest.mark.parametrize("kind", connectors.kinds())
def test_what_it_owns_is_named_after_it(settings: Settings, kind: str) -> None:
    connector = connectors.load(settings, kind)
    name = "mine" if kind == "outbox" else f"mine_{kind}"
    assert connector.name == connector.config["slot.name"] == connector.config["topic.prefix"] == name
    assert connector.offsets_topic == f"{name}.offsets"
    assert connector.publication == ("outbox" if kind == "outbox" else name)
    assert not any("${settings:" in value or value == "None" for value in connector.config.values())


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


def test_a_route_to_one_topic_gets_no_router_for_the_markers(settings: Settings, events: Path) -> None:
    """It would rename every event. The expression of such a file leaves the markers out itself."""
    declare(events, "order", topic="Sales")
    config = {connectors.REPLACEMENT: "Sales"}
    assert connectors.add_routers(config, catalog.of_project(settings), settings.markers_topic) == config


@pytest.mark.parametrize("kind", connectors.kinds())
def test_every_expression_of_a_transform_is_one_of_re2(settings: Settings, kind: str) -> None:
    config = connectors.transforms(connectors.load(settings, kind).config)
    expressions = [value for name, value in config.items() if name.endswith((".regex", ".pattern"))]
    assert [re2.compile(one).pattern for one in expressions] == expressions
    assert not any("(?<" in one for one in expressions), "RE2/J learned groups named as in Java in 1.8 only"
    assert bool(expressions) is (kind == "outbox")


def test_transforms_and_predicates_of_ones_own_stay(settings: Settings, events: Path) -> None:
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
    own = {"transforms": "outbox,mask", "predicates": "mine", connectors.PLACEMENT: "type:header"}
    added = connectors.add_cloudevents_headers(own, "/shop", {"item": "shop.item"})
    assert added["transforms"] == "specversion,specversion-header,outbox,mask,content-type,source-of-item"
    assert added["predicates"] == "mine,source-of-item"


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


# CloudEvents ------------------------------------------------------------------------------------------------------


def name_source(events: Path, source: str) -> None:
    """Let the project name the source of its events."""
    file = events.parent / project.FILE
    file.write_text(f"{file.read_text()}cloudevents-source = {json.dumps(source)}\n")
    project.load.cache_clear()


def test_source_of_each_aggregate_is_set_before_its_topic_is_renamed(settings: Settings, events: Path) -> None:
    declare(events, "item")
    declare(events, "order", topic="Sales")
    plain = connectors.load(settings).config
    name_source(events, "/shop/")
    config = connectors.load(settings).config
    expected = ["specversion", "specversion-header", "outbox", "content-type", "source-of-item", "source-of-order"]
    assert config["transforms"].split(",")[: len(expected) + 1] == [*expected, "topic-of-order"]
    for name, topic in (("item", r"shop\.item"), ("order", r"shop\.order")):
        assert config[f"transforms.source-of-{name}.value.literal"] == f"/shop/{name}"
        assert config[f"predicates.{config[f'transforms.source-of-{name}.predicate']}.pattern"] == topic
    # What there is without them stays.
    placement = connectors.PLACEMENT
    assert config[placement].startswith(f"{plain[placement]},")
    own = {"transforms", placement}
    assert {key: config[key] for key in plain.keys() - own} == {key: plain[key] for key in plain.keys() - own}


@pytest.mark.parametrize("source", ["/shop?a=1", '/"shop"', "${settings:connector}", "1.0"])
def test_source_that_is_no_uri_is_refused(settings: Settings, events: Path, source: str) -> None:
    declare(events, "item")
    name_source(events, source)
    with raises("project-wrong", "cloudevents-source"):
        connectors.load(settings)


# Settings ---------------------------------------------------------------------------------------------------------


def test_connect_uses_our_address_of_the_database_or_its_own(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.touch()

    def place(**settings: Any) -> list[str]:
        config = connectors.load(load(tmp_path, environment=False, **settings)).config
        return [config[f"database.{part}"] for part in ("hostname", "port", "dbname", "sslmode", "sslrootcert")]

    ours = {"source_db_url": f"postgresql://db:5433/ours?sslmode=verify-full&sslrootcert={authority}"}
    assert place(**ours) == ["db", "5433", "ours", "verify-full", str(authority)]
    theirs = "postgresql://pooled?sslrootcert=/of/connect.pem"
    assert place(**ours, connect_source_db_url=theirs) == ["pooled", "5433", "ours", "verify-full", "/of/connect.pem"]
