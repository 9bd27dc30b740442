"""The connector's configuration as it is rendered from the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outbox import connect
from outbox.settings import load


def rendered(tmp_path: Path, **settings: Any) -> connect.Config:
    return connect.render(load(tmp_path, environment=False, **settings))


def test_a_line_without_a_value_is_left_out(tmp_path: Path) -> None:
    assert "database.sslrootcert" not in rendered(tmp_path)
    assert "None" not in rendered(tmp_path).values()


@pytest.mark.parametrize(
    ("setting", "line"),
    [("host", "database.hostname"), ("sslrootcert", "database.sslrootcert")],
)
def test_connect_sees_the_ledger_as_we_do_unless_told_otherwise(tmp_path: Path, setting: str, line: str) -> None:
    ours = tmp_path / "ours"
    ours.touch()
    assert rendered(tmp_path, **{f"ledger_{setting}": str(ours)})[line] == str(ours)
    both = {f"ledger_{setting}": str(ours), f"connect_ledger_{setting}": "theirs"}
    assert rendered(tmp_path, **both)[line] == "theirs"
