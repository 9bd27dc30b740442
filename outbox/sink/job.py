"""What a sink job declares: which topic, how its records are decoded, and the SQL that applies them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outbox.settings import Settings
from outbox.sink.verdict import Judge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MODULE = "sinks.job"  # by name: the machinery does not import the sample


@dataclass(frozen=True)
class Job:
    """``decode`` turns Kafka's records into the columns of the staged table, and leaves in a column ``record`` those
    that are not surely valid; ``judge`` says what is wrong with them. A column ``traceparent`` is not staged: the log
    tells of the events that have one.
    """

    topic: str
    decode: Callable[[DataFrame], DataFrame]
    judge: Judge
    staged: Path
    strategies: Path
    projection: Path


def load(settings: Settings) -> Job:
    """The job of this project. It does not load Spark, as ``decode`` does so when it is called."""
    job = importlib.import_module(MODULE).job(settings)
    assert isinstance(job, Job)  # noqa: S101
    return job
