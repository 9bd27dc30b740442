"""The second connector beside the outbox's."""

from __future__ import annotations

from pathlib import Path

import pytest
from outbox import Settings, load_settings
from outbox.sinks import load_connector

KINDS = sorted(file.stem for file in (Path(__file__).parents[3] / "connect").glob("*.json"))
# What two connectors of one database must not share.
OWN = ("slot.name", "topic.prefix", "publication.name", "offsets.storage.topic", "table.include.list")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(tmp_path, environment=False, connector="mine", topic_prefix="mine.of")


def test_no_two_share_what_must_be_their_own(settings: Settings) -> None:
    configs = [load_connector(settings, kind).config for kind in KINDS]
    assert len(configs) == 2
    for name in OWN:
        assert len({config[name] for config in configs}) == len(configs), name


def test_they_differ_in_nothing_that_makes_the_relay_lose_or_repeat(settings: Settings) -> None:
    """Careful choices for one connector hold for the other; only names, table and form of the records differ.

    Only events need an order in a snapshot: a captured table has one row per key.
    """
    others = ("snapshot.select.", "transforms", "key.", "value.", "header.", "decimal.", "time.", "binary.")
    left = [
        {name: value for name, value in one.config.items() if name not in OWN and not name.startswith(others)}
        for one in (load_connector(settings, kind) for kind in KINDS)
    ]
    assert left[0] == left[1]
