"""The process that Spark forks Python workers from (`spark.python.daemon.module`): `pyspark.daemon`, for short tasks.

Spark puts its JAR and archives of PySpark on Python's path, and before each task a worker reads their directories of
thousands of entries again. After each task it collects garbage among all that it has imported. The two took a third of
the workers' processor time.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import PathFinder

ARCHIVES = (".jar", ".zip")
COLLECTED_AT = 100_000  # objects; 700 by default, which a hundred records have, and they are needed
TASKS = "outbox.sink.spark.reader"  # what they run; imported here, so that no worker has to


def main() -> None:
    """Serve until Spark ends this process."""
    sys.path[:] = without_archives(sys.path)
    sys.path_importer_cache.clear()
    import_module(TASKS)
    import_module("pyarrow.compute")
    import_module("pyarrow").array([0])  # the first array imports pandas, if it is installed
    daemon = import_module("pyspark.daemon")
    gc.collect()
    gc.freeze()  # collections look at what comes later only
    gc.set_threshold(COLLECTED_AT)
    daemon.manager()


def without_archives(path: Sequence[str]) -> list[str]:
    """Python's path without archives; all of it if PySpark is not installed and only in one of them."""
    folders = [entry for entry in path if not entry.endswith(ARCHIVES)]
    return folders if PathFinder.find_spec("pyspark", folders) else [*path]


if __name__ == "__main__":
    main()
