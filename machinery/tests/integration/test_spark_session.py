"""The settings of Spark: ours are those of our session, and what it shows of itself is for this host only."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from outbox.base.settings import load
from outbox.sink.spark.session import FEW_ROWS, session
from outbox.testing.failures import raises


def test_another_session_has_sparks_own_settings_for_queries(spark: SparkSession) -> None:
    assert {name: spark.conf.get(name) for name in FEW_ROWS} == FEW_ROWS
    assert {name: spark.newSession().conf.get(name) for name in FEW_ROWS} == {
        "spark.sql.codegen.wholeStage": "true",
        "spark.sql.shuffle.partitions": "200",
    }


def test_the_ui_is_refused_where_it_would_listen_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    elsewhere = load(tmp_path, environment=False, spark_master="spark://elsewhere:7077", sink_ui_port=4040)
    with raises("ui-not-local", "spark://elsewhere:7077"):
        session(elsewhere)
