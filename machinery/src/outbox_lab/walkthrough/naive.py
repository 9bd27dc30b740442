"""python -m outbox_lab.walkthrough.naive: run the naive sink of the workload, in a container of docker-compose.

Without one it waits until it is stopped: Docker would start again what has ended.
"""

from __future__ import annotations

import os
import signal
import sys

from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.sink import discovery
from outbox_lab.walkthrough import workload


def main() -> None:
    """Become the sink."""
    try:
        name = workload.load(seed=0).naive
        is_known = name in discovery.sinks(load())
    except Failure as failure:
        sys.exit(f"outbox: {failure}")
    if name is not None and is_known:
        os.execvp(sys.executable, ["python", "-m", "outbox", "sink", name])  # noqa: S606
    print("the workload names no naive sink: there is nothing to run", flush=True)  # noqa: T201
    signal.pause()


if __name__ == "__main__":
    main()
