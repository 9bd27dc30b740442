"""A Spark that can write Delta tables."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from outbox.base.settings import load
from outbox.sink import spec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session of the module."""
    from outbox.sink.spark.session import session as start  # most tests do without Spark

    _end_jvm()
    target = spec.sinks(load(environment=False))["lakehouse"].job.target
    session = start(load(tmp_path_factory.mktemp("spark"), environment=False), [target])
    yield session
    session.stop()
    gc.collect()  # while the sockets that it leaves are expected
    _end_jvm()


def _end_jvm() -> None:
    """End PySpark's JVM, if this process has one: only one that is started with Delta's jars can write tables."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(30)
        SparkContext._gateway = SparkContext._jvm = None
