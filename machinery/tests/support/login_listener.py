"""A listener that speaks as much of Kafka's protocol as a login needs, writes the login down, and refuses it."""

from __future__ import annotations

import socketserver
import ssl
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from outbox_lab.stack import ports
from tests.support.secured import Certificates

API_VERSIONS, HANDSHAKE, AUTHENTICATE = 18, 17, 36
OFFERED = {3: (0, 1), HANDSHAKE: (0, 1), AUTHENTICATE: (0, 0), API_VERSIONS: (0, 0)}
UNSUPPORTED_VERSION, AUTHENTICATION_FAILED = 35, 58
REFUSAL = "this listener takes nobody"


@dataclass
class Listener:
    """What clients have sent: mechanisms, and the first message of each."""

    bootstrap: str
    logins: list[tuple[str, bytes]] = field(default_factory=list)


@contextmanager
def listening(certificates: Certificates) -> Iterator[Listener]:
    """A listener with TLS on a free port of loopback."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), context.wrap_socket(self.request, server_side=True) as client:
                _talk(client.makefile("rwb"), seen.logins)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server((ports.LOOPBACK, 0), Handler) as server:
        seen = Listener(f"{ports.LOOPBACK}:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield seen
        finally:
            server.shutdown()


def _talk(stream: Any, logins: list[tuple[str, bytes]]) -> None:
    """Answer the requests of a client until it hangs up."""
    mechanism = ""
    while size := stream.read(4):
        request = stream.read(*struct.unpack(">i", size))
        key, version, correlation, name_length = struct.unpack(">hhih", request[:10])
        body = request[10 + max(0, name_length) :]
        if key == API_VERSIONS:  # of a later version it is refused in the format of the first one
            ranges = b"".join(struct.pack(">hhh", api, *versions) for api, versions in OFFERED.items())
            answer = struct.pack(">hi", UNSUPPORTED_VERSION if version else 0, len(OFFERED)) + ranges
        elif key == HANDSHAKE:
            mechanism = body[2:].decode()
            answer = struct.pack(">hi", 0, 1) + _text(mechanism)
        else:
            logins.append((mechanism, body[4:]))
            answer = struct.pack(">h", AUTHENTICATION_FAILED) + _text(REFUSAL) + struct.pack(">i", 0)
        stream.write(struct.pack(">ii", len(answer) + 4, correlation) + answer)
        stream.flush()


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()
