"""The table of the sink `lakehouse`."""

from __future__ import annotations

import re

import pytest
from outbox.base.settings import load
from outbox.sink import spec
from outbox.sink.lakehouse.files import Folder, is_reachable

from tests.support.paths import ROOT

COLUMN = re.compile(r"^ {4}(\w+) +[A-Z]+", re.MULTILINE)


def test_the_table_has_the_columns_of_its_events_their_place_and_their_day() -> None:
    declared = COLUMN.findall((ROOT / "sinks" / "lakehouse" / "table.sql").read_text())
    columns = spec.sinks(load(environment=False))["lakehouse"].layout.columns
    assert declared == ["event_id", "event_day", "partition", "offset", *(column.name for column in columns)]


@pytest.mark.parametrize(
    ("uri", "found"),
    [
        ("file:///a lake/lakehouse", True),
        ("/lake", True),
        ("s3a://bucket/lake", True),
        ("hdfs://names:8020/lake", False),
    ],
)
def test_tasks_stage_on_shared_disks_and_in_s3_and_elsewhere_the_driver_reads(uri: str, found: bool) -> None:
    assert is_reachable(uri) is found


def test_the_keys_that_tasks_get_are_in_no_log_line() -> None:
    assert "secret" not in repr(Folder("s3a://bucket/lake.staging/1", {"secret_key": "secret"}))
