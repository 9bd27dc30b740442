"""The tables that `outbox check` joins: bounded in memory, private, and deleted however the check ends."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from outbox.audit import comparison, store
from outbox.audit.comparison import Observed, compare
from outbox.audit.report import Report
from outbox.audit.sinks import Sinks
from outbox.audit.source import Source, Written
from outbox.audit.store import Store
from outbox_lab.testing.failures import raises
from tests.support.audit_chain import NOW_MS, Chain, codes, declare

EVENTS = 250_000
ID = "019a0000-0000-7000-8000-{:012x}"
DELIVERED = f"""
INSERT INTO delivered
SELECT 1, 0, masked(format('019a0000-0000-7000-8000-{{:012x}}', number)), 'key ' || number % 10,
       1 + number // 10, 0, number, ['1']
  FROM range({EVENTS}) AS numbers (number)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chain]:
    """A chain whose events take more memory than a check may."""
    monkeypatch.setitem(store.CONFIG, "memory_limit", "32MB")
    monkeypatch.setitem(store.CONFIG, "threads", 1)
    monkeypatch.setattr(comparison, "PASS_ROWS", EVENTS // 4)
    (tmp_path / "events").mkdir()
    made = Chain(declare(tmp_path / "events"))
    with closing(made.logs):
        yield made


def compared(chain: Chain) -> Report:
    """The comparison of many events, half of which were pruned."""
    chain.logs.store.run(DELIVERED)
    rows = (
        Written(1, 0, ID.format(number), f"key {number % 10}", 1 + number // 10, NOW_MS, ["1"])
        for number in range(0, EVENTS, 2)
    )
    return compare(Observed(chain.declared, Sinks(), chain.logs, Source(rows)), lambda _: None)


def test_memory_does_not_grow_with_the_number_of_events(chain: Chain, folder: Path) -> None:
    report = compared(chain)
    assert (report.outbox_events, report.pruned, codes(report)) == (EVENTS // 2, EVENTS // 2, [])
    assert list(folder.glob(f"{store.FOLDER_PREFIX}*/*")), "nothing was spilled"


def test_a_full_disk_is_a_failure(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    chain.logs.store.run("SET max_temp_directory_size = '1MB'")
    with raises("no-room", "point TMPDIR"):
        compared(chain)


def test_temporary_files_are_private_and_deleted(folder: Path) -> None:
    with closing(Store()):
        [made] = folder.iterdir()
        assert made.stat().st_mode & 0o777 == 0o700
    assert not list(folder.iterdir())


def test_a_check_deletes_what_a_killed_one_has_left(folder: Path) -> None:
    left = folder / f"{store.FOLDER_PREFIX}left"
    left.mkdir()
    (left / "rows.tmp").touch()
    with closing(Store()), closing(Store()):
        assert not left.exists()
        assert len(list(folder.iterdir())) == 2, "those of checks that run stay"


def test_a_temporary_folder_that_cannot_be_written_is_a_failure(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "missing"))
    with raises("no-room", "point TMPDIR"):
        Store()
