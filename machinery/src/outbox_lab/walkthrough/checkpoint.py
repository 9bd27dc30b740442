"""The Spark checkpoint of a sink in a folder: which batches were planned, and which Spark has recorded as committed."""

from __future__ import annotations

import json
from pathlib import Path

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.sink.remembering.positions import checkpoint_folder, checkpoint_uri

Ends = dict[str, dict[int, int]]


class Checkpoint:
    """The checkpoint of one generation of a sink. It is only read."""

    def __init__(self, settings: Settings, sink: str, generation: int) -> None:
        """Raises Failure if it is not in a folder of this host."""
        uri = checkpoint_uri(settings, sink, generation)
        folder = checkpoint_folder(uri)
        if folder is None:
            raise Failure(
                f"the walkthrough cannot read the checkpoint {uri}", "use a folder", code="checkpoint-elsewhere"
            )
        self._planned, self._committed = folder / "offsets", folder / "commits"

    def planned(self) -> int:
        """The last planned batch; -1 before the first."""
        return _last(self._planned)

    def committed(self) -> int:
        """The last batch that Spark has recorded as committed; -1 before the first."""
        return _last(self._committed)

    def committed_at_ms(self, batch: int) -> int | None:
        """When Spark recorded a batch as committed, in Unix milliseconds; None if it has not, or not any more."""
        try:
            return (self._committed / str(batch)).stat().st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return None

    def ends(self, batch: int) -> Ends:
        """By topic and partition, the offset where a planned batch ends. The last line of its file has them."""
        by_topic = json.loads((self._planned / str(batch)).read_text().splitlines()[-1])
        return {
            topic: {int(partition): offset for partition, offset in partitions.items()}
            for topic, partitions in by_topic.items()
        }


def _last(log: Path) -> int:
    return max((int(entry.name) for entry in log.glob("[0-9]*")), default=-1)
