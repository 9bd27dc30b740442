"""Cost of spans: sinks that export them and sinks that do not, and appends with a span and without."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch

from outbox.base import spans
from outbox.base.settings import Settings
from outbox_lab.stack.command import SinkProcess

from bench.append import Transfers, alternated

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Exporting(SinkProcess):
    """A sink that exports spans to a collector."""

    def __init__(self, settings: Settings, name: str, url: str) -> None:
        super().__init__(f"sink-{name}", settings, ["sink", name])
        self._url = url

    def env(self) -> Mapping[str, str]:
        return {**super().env(), ENDPOINT: self._url}


@contextmanager
def collector() -> Iterator[str]:
    """A collector that takes all spans and keeps none; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def measure_appends(make: Callable[[], None], transfers: int, url: str) -> dict[str, Transfers]:
    """Make transfers in turns, whose append has a span and has none. A process exports spans once."""
    with patch.dict(os.environ, {ENDPOINT: url}), spans.exported("bench"):
        sides: dict[str, AbstractContextManager[object]] = {
            "spans": nullcontext(),
            "none": patch.object(spans, "are_recorded", return_value=False),
        }
        alternated(make, transfers, sides)  # the first transactions of a connection are slow
        return alternated(make, transfers, sides)
