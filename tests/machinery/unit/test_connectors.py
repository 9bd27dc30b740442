"""The connectors' files: what is named after a connector, and where two of them must not meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outbox.base.settings import Settings, load
from outbox.relay import connectors
from tests.support.paths import ROOT


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(tmp_path, environment=False, connector="mine", topic="events")


@pytest.mark.parametrize("kind", connectors.kinds())
def test_what_it_owns_is_named_after_it(settings: Settings, kind: str) -> None:
    connector = connectors.load(settings, kind)
    name = "mine" if kind == "outbox" else f"mine_{kind}"
    assert connector.name == connector.config["slot.name"] == connector.config["topic.prefix"] == name
    assert connector.offsets_topic == f"{name}.offsets"
    assert connector.publication == ("outbox" if kind == "outbox" else name)
    assert not any("${settings:" in value for value in connector.config.values())


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A folder with our file of the outbox, and that of a connector which captures a table."""
    ours = json.loads((ROOT / "connect" / "outbox.json").read_text())
    captured = {name: value for name, value in ours.items() if not name.startswith("transforms")}
    for name in ("topic.prefix", "slot.name", "offsets.storage.topic"):
        captured[name] = captured[name].replace("${settings:connector}", "${settings:connector}_orders")
    captured |= {"publication.name": "${settings:connector}_orders", "table.include.list": "public.orders"}
    for kind, config in {"outbox": ours, "orders": captured}.items():
        (tmp_path / f"{kind}.json").write_text(json.dumps(config))
    monkeypatch.setattr(connectors, "folder", lambda: tmp_path)
    return ["outbox", "orders"]


def test_another_file_is_another_connector_and_the_outbox_comes_first(settings: Settings, two: list[str]) -> None:
    assert connectors.kinds() == two
    (orders,) = connectors.others(settings)
    assert (orders.name, orders.table, orders.is_outbox) == ("mine_orders", ("public", "orders"), False)
    assert orders.topic == "mine_orders.public.orders"
    assert orders.command("apply") == "outbox connect apply orders"


def test_the_topics_of_a_connector_and_only_the_outbox_has_markers(settings: Settings, two: list[str]) -> None:
    outbox, orders = (connectors.load(settings, kind) for kind in two)
    assert [(spec.name, spec.partitions) for spec in connectors.topic_specs(settings, outbox)] == [
        ("events", settings.topic_partitions),
        ("mine.offsets", 1),
        ("mine.markers", 1),
    ]
    assert [spec.name for spec in connectors.topic_specs(settings, orders)] == [orders.topic, "mine_orders.offsets"]


def rendered(tmp_path: Path, **settings: Any) -> connectors.Config:
    return connectors.load(load(tmp_path, environment=False, **settings)).config


def test_a_line_without_a_value_is_left_out(tmp_path: Path) -> None:
    assert "database.sslrootcert" not in rendered(tmp_path)
    assert "None" not in rendered(tmp_path).values()


@pytest.mark.parametrize(
    ("setting", "line"),
    [("host", "database.hostname"), ("sslrootcert", "database.sslrootcert")],
)
def test_connect_uses_our_address_of_the_database_unless_it_has_its_own(
    tmp_path: Path, setting: str, line: str
) -> None:
    ours = tmp_path / "ours"
    ours.touch()
    given = {f"source_db_{setting}": str(ours)}
    assert rendered(tmp_path, **given)[line] == str(ours)
    assert rendered(tmp_path, **given, **{f"connect_source_db_{setting}": "theirs"})[line] == "theirs"
