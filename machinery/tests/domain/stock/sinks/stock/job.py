"""Item events in, stock out: a sink for each built-in strategy, called like it. The tests compare strategies."""

from outbox.sink.remembering.strategy import BUILT_IN
from outbox.sinks import SinkJob

jobs = [SinkJob(name=file.stem, events=["item"], strategy=file.stem) for file in sorted(BUILT_IN.glob("*.sql"))]
