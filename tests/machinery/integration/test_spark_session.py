"""The settings of Spark: ours are those of our session."""

from __future__ import annotations

from pyspark.sql import SparkSession

from outbox.sink.spark.session import FEW_ROWS


def test_another_session_has_sparks_own_settings_for_queries(spark: SparkSession) -> None:
    assert {name: spark.conf.get(name) for name in FEW_ROWS} == FEW_ROWS
    assert {name: spark.newSession().conf.get(name) for name in FEW_ROWS} == {
        "spark.sql.codegen.wholeStage": "true",
        "spark.sql.shuffle.partitions": "200",
    }
