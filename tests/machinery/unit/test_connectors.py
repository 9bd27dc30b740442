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


def test_another_file_is_another_connector(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = json.loads(((ROOT / "connect") / "changes.json").read_text())
    for kind, table in (("outbox", "outbox"), ("orders", "orders")):
        (tmp_path / f"{kind}.json").write_text(json.dumps({**written, "table.include.list": f"public.{table}"}))
    monkeypatch.setattr(connectors, "folder", lambda: tmp_path)
    assert [other.table for other in connectors.others(settings)] == [("public", "orders")]


def test_the_topics_of_a_connector_and_only_the_outbox_has_markers(settings: Settings) -> None:
    outbox, changes = (connectors.load(settings, kind) for kind in connectors.kinds())
    assert [(spec.name, spec.partitions) for spec in connectors.topic_specs(settings, outbox)] == [
        ("events", settings.topic_partitions),
        ("mine.offsets", 1),
        ("mine.markers", 1),
    ]
    assert [spec.name for spec in connectors.topic_specs(settings, changes)] == [changes.topic, "mine_changes.offsets"]


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
