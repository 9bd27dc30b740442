"""A warehouse for each test: a DuckDB file, or Snowflake as `fakesnow` plays it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fakesnow
import pytest

pytest_plugins = ["outbox_lab.testing.plugin"]


@pytest.fixture(autouse=True)
def duckdb_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a file of its own."""
    monkeypatch.setenv("WAREHOUSE", str(tmp_path / "warehouse.duckdb"))


@pytest.fixture
def snowflake_account(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An account of Snowflake that is in this process."""
    monkeypatch.setenv("WAREHOUSE", "snowflake")
    with fakesnow.patch():
        yield
