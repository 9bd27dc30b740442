"""Spark without a query: for what is decoded."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from outbox.base.settings import load
from tests.sink import NOW_MS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# PySpark leaves the socket that it fetches results over to the garbage collector.
leaves_sockets = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"
)
# What Kafka's source gives.
RECORD = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "headers array<struct<key string, value binary>>"
)
RECORDED_AT = datetime.fromtimestamp(NOW_MS / 1000, UTC)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session of the module."""
    from outbox.sink.spark.session import session as start  # most tests do without Spark

    session = start(load(tmp_path_factory.mktemp("spark")))
    yield session
    session.stop()
