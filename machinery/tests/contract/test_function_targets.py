"""Targets that are functions in the contract tests: upserts pass, and other functions are named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from outbox.base.settings import Settings
from outbox.sink import discovery
from outbox.sink.spec import SinkJob
from outbox.targets import newest
from outbox_lab.testing.contract.contract import keep, untestable
from tests import items, targets
from tests.targets import erase, totals

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["add", "erase", "replace_any", "totals"]  # of a target's module

FreshDatabases = Callable[[], AbstractContextManager[Settings]]
SEED = 47


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(targets.FILE, str(tmp_path / "target.db"))


def add(events: pa.Table) -> None:
    """Adds what an event adds, each time that it is called."""
    with targets.database() as connection:
        connection.executemany(
            """
            INSERT INTO stock VALUES (:item_id, :version % 10, :version)
            ON CONFLICT (item_id) DO UPDATE SET total = stock.total + excluded.total,
                                                version = max(stock.version, excluded.version)
            """,
            events.to_pylist(),
        )


def replace_any(events: pa.Table) -> None:
    """Takes the newest of a batch, although the place may have a newer one."""
    rows = newest(events, key="item_id", version="version").to_pylist()
    with targets.database() as connection:
        connection.executemany("INSERT OR REPLACE INTO stock VALUES (:item_id, :version, :version)", rows)


def require(fresh: FreshDatabases, target: str, strategy: str = "dedup") -> None:
    job = SinkJob("search", Path("none"), target, [items.AGGREGATE], strategy)
    with fresh() as settings:
        spec = discovery.resolve(settings, job)
        assert untestable(spec) is None
        keep(settings, spec, seed=SEED, examples=3, shrinking_max=0)


@pytest.mark.parametrize(("function", "strategy"), [("write", "dedup"), ("write_newest", "upsert")])
def test_an_upsert_keeps_the_contract(fresh_databases: FreshDatabases, function: str, strategy: str) -> None:
    require(fresh_databases, f"{targets.__name__}:{function}", strategy)
    assert targets.totals() == [], "the test has left nothing"


@pytest.mark.parametrize(
    ("function", "strategy", "way"),
    [
        ("add", "dedup", "the process ends between target and commit"),
        ("replace_any", "upsert", "written late by a driver that was cut off"),
    ],
)
def test_what_is_no_upsert_is_named(fresh_databases: FreshDatabases, function: str, strategy: str, way: str) -> None:
    with pytest.raises(AssertionError) as caught:
        require(fresh_databases, f"{__name__}:{function}", strategy)
    expected = f"sink search, {way}: table totals of {__name__}:{function}, row key "
    assert str(caught.value).startswith(expected), caught.value
    assert targets.totals() == []


def test_a_place_that_is_not_empty_is_left_alone(fresh_databases: FreshDatabases) -> None:
    with targets.database() as connection:
        connection.execute("INSERT INTO stock VALUES ('mine', 1, 1)")
    with pytest.raises(AssertionError, match="is not empty, it has the key mine"):
        require(fresh_databases, f"{targets.__name__}:write")
    assert targets.totals() == [("mine", 1, 1)]


def test_a_module_without_totals_is_left_out(monkeypatch: pytest.MonkeyPatch, fresh_databases: FreshDatabases) -> None:
    monkeypatch.delattr(targets, "totals")
    with fresh_databases() as settings:
        job = SinkJob("search", Path("none"), f"{targets.__name__}:write", [items.AGGREGATE])
        assert str(untestable(discovery.resolve(settings, job))).endswith("has no function totals")
