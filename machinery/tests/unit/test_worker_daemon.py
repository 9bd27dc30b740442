"""The process that Spark forks Python workers from."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from outbox.sink.spark.daemon import without_archives


def test_tasks_read_no_archive() -> None:
    found = without_archives(["/spark/pyspark.zip", *sys.path, "/spark/spark-core.jar"])
    assert found == [entry for entry in sys.path if not entry.endswith(".zip")]


def test_pyspark_that_is_in_an_archive_only_stays_there(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pyspark.zip", "w") as archive:
        archive.writestr("pyspark/__init__.py", "")
    path = [str(tmp_path), str(tmp_path / "pyspark.zip")]
    assert without_archives(path) == path
