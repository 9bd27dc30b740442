"""Become a program of Spark's distribution: ``python -m outbox.jvm.spark_class CLASS ARGUMENTS…``.

It is Spark's script ``spark-class``, with the Java and the Spark that our own commands use. The containers of a cluster
begin like this.
"""

from __future__ import annotations

import os
import sys

from outbox.base.errors import Failure
from outbox.jvm.jars import pyspark_folder
from outbox.jvm.java import java_home

if __name__ == "__main__":
    try:
        spark = pyspark_folder()
        os.environ |= {"JAVA_HOME": java_home(), "SPARK_HOME": str(spark)}
    except Failure as failure:
        sys.exit(f"outbox: {failure}")
    program = str(spark / "bin" / "spark-class")
    os.execv(program, [program, *sys.argv[1:]])  # noqa: S606
