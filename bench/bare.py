"""The least that Spark does with a topic: a session with its defaults counts the records of one batch of Kafka.

A program of its own: TOPIC FILE. The variable KAFKA has the options of Spark's source. It writes the count into the
file, and waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from outbox.jvm.jars import jars
from pyspark.sql import SparkSession


def main(topic: str, file: str) -> None:
    """Count the records of the topic."""
    found = ",".join(map(str, jars("spark")))
    spark = SparkSession.builder.master("local[2]").config("spark.jars", found).getOrCreate()
    options = {**json.loads(os.environ["KAFKA"]), "subscribe": topic}
    Path(file).write_text(str(spark.read.format("kafka").options(**options).load().count()))
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
