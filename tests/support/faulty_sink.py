"""`outbox sink` with a fault that nobody can cause from outside: the first argument names it, the others are outbox's.

Everything else of the process is the product's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import TracebackType
from typing import Any

from outbox.base.errors import Failure
from outbox.base.wait import wait_for
from outbox.cli import main
from outbox.sink.batch import Batch
from outbox.sink.postgres.writer import PostgresWriter
from outbox.sink.spark import stream
from outbox.sink.spark.checkpoint import Checkpoint
from outbox.sink.writer import Counts

TIMEOUT_S = 60
REFUSED = "the apply is refused"


def commit_unseen() -> None:
    """The sink `naive` never sees that Spark has committed a batch."""
    sees = Checkpoint.is_committed

    def is_committed(self: Checkpoint, batch_id: int) -> bool:
        return not self.uri.endswith("/naive") and sees(self, batch_id)

    patch(Checkpoint, is_committed=is_committed)
    patch(stream, COMMIT_TIMEOUT_S=1)


def failure_during_stop() -> None:
    """An apply fails when the process has been asked to stop, and the stop is first to get the apply's lock."""
    make = stream.Stream.__init__

    def make_with_lock(self: stream.Stream, **arguments: Any) -> None:
        make(self, **arguments)
        self._applying = GivenToStop(self)  # type: ignore[assignment]

    def apply(self: PostgresWriter, batch: Batch) -> Counts:
        os.kill(os.getpid(), signal.SIGTERM)
        raise Failure(REFUSED)

    patch(stream.Stream, __init__=make_with_lock)
    patch(PostgresWriter, apply=apply)


class GivenToStop:
    """A lock: after an error the thread continues when the stop has had the lock."""

    def __init__(self, of: stream.Stream) -> None:
        self._lock = threading.Lock()
        self._of = of

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._lock.release()
        if error is not None:
            wait_for("the stop", lambda: self._of._stopping, timeout_s=TIMEOUT_S)


def patch(owner: object, **attributes: object) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


if __name__ == "__main__":
    fault = {one.__name__: one for one in (commit_unseen, failure_during_stop)}[sys.argv.pop(1)]
    fault()
    main()
