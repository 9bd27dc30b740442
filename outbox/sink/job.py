"""What a sink job declares: which topic, how its records are decoded, and the SQL that applies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Job:
    """``decode`` turns Kafka's records into the columns of the staged table and those of `outbox.sink.decode`."""

    topic: str
    decode: Callable[[DataFrame], DataFrame]
    staged: Path
    strategies: Path
    projection: Path
