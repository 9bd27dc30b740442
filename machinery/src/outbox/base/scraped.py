"""A port for Prometheus and orchestrators: metrics and health, without a token.

A web page can make a browser ask such a port: its own name then leads to the port's address (DNS rebinding), and the
browser lets it read the answers. The name is in the header Host, so names that others could own are refused.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from ipaddress import ip_address
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client.exposition import ThreadingWSGIServer

from outbox.base.errors import Failure

if TYPE_CHECKING:
    from collections.abc import Iterable
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

REFUSAL = "ask by an address, or by a name without a dot"


def is_own_name(host: str) -> bool:
    """Whether a header Host has an address, or a name without a dot, as ``localhost`` and those of containers."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return "." not in name or bool(ip_address(name))
    except ValueError:
        return False


@contextmanager
def served(app: WSGIApplication, at: tuple[str, int], given_by: str) -> Iterator[int]:
    """Serve within the block at a host and port, and yield the port.

    Raises Failure if the port is taken; ``given_by`` says where to choose another one.
    """
    host, port = at
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        own: type[ThreadingWSGIServer] = type("Server", (ThreadingWSGIServer,), {"address_family": family})
        server = make_server(host, port, _guarded(app), own, _Handler)
    except OSError as error:
        raise Failure(
            f"the metrics cannot be served at {host}:{port}: {error.strerror}",
            f"choose another {given_by}",
            code="port-taken",
        ) from None
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _guarded(app: WSGIApplication) -> WSGIApplication:
    def checked(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if is_own_name(environ.get("HTTP_HOST", "")):
            return app(environ, start_response)
        refused = HTTPStatus.MISDIRECTED_REQUEST
        start_response(f"{refused.value} {refused.phrase}", [("Content-Type", "text/plain")])
        return [REFUSAL.encode()]

    return checked


class _Handler(WSGIRequestHandler):
    """Logs no request."""

    def log_message(self, format: str, *args: object) -> None:
        pass
