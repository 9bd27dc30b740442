"""The files in which tasks stage the rows of a Delta table."""

from __future__ import annotations

import pytest

from outbox.sink.lakehouse.files import Folder, is_reachable


@pytest.mark.parametrize(
    ("uri", "found"),
    [
        ("file:///a lake/lakehouse", True),
        ("/lake", True),
        ("s3a://bucket/lake", True),
        ("hdfs://names:8020/lake", False),
    ],
)
def test_tasks_stage_on_shared_disks_and_in_s3_only(uri: str, found: bool) -> None:
    assert is_reachable(uri) is found


def test_the_keys_that_tasks_get_are_in_no_log_line() -> None:
    assert "secret" not in repr(Folder("s3a://bucket/lake.staging/1", {"secret_key": "secret"}))
