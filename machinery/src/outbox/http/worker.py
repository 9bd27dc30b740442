"""A gunicorn worker that gives a request to a thread only after the whole request has arrived.

gunicorn's own ``gthread`` worker reads a request in the thread that serves it. So a few clients that send half a
request hold all threads, and gunicorn expects a buffering proxy in front of it. This worker is that buffer: its main
loop receives every request without blocking, and its threads never read from a socket.

Three alternatives failed `test_http_worker.py`. With gunicorn 27's own ``gthread``, and with granian 2.8 in WSGI mode,
clients that send half a body hold every thread; granian has no time limit for a body. waitress 3.0 buffers requests,
but it never ends a client that sends a byte a second, and at SIGTERM it drops requests that are still arriving.

Bounds per worker process: `CONNECTIONS` connections, and about `HEAD_MAX_BYTES` plus `body.MAX_BYTES` for each.
A request that takes longer than ``request_timeout_s`` to arrive gets 408; a client that takes longer to read its
response is disconnected. TLS ends in front of the service.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from selectors import EVENT_READ
from socket import SHUT_WR
from typing import Any

from gunicorn.asgi.parser import (  # type: ignore[import-untyped]
    LimitRequestHeaders,
    LimitRequestLine,
    ParseError,
    PythonProtocol,
)
from gunicorn.http.parser import RequestParser  # type: ignore[import-untyped]
from gunicorn.workers.gthread import ThreadWorker  # type: ignore[import-untyped]

from outbox.http import body, problems

CONNECTIONS = 500  # with the files of the process below 1024, the usual limit of open files
HEAD_MAX_BYTES = 32 * 1024
LINGER_S = 2.0  # a rejected client has this time to read why, before its connection is closed
RECEIVE_BYTES = 64 * 1024
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

# Every other error of the parser is 400.
STATUSES = {
    LimitRequestLine: HTTPStatus.REQUEST_URI_TOO_LONG,
    LimitRequestHeaders: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
}

Connection = Any  # gunicorn's TConn


class Arrival:
    """One request, as much of it as has arrived."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.received = bytearray()
        self._parser = PythonProtocol(on_headers_complete=self._end_head, on_body=self._count)
        self._has_head = False
        self._invalid: HTTPStatus | None = None
        self._is_continued = False
        self._body_bytes = 0

    @property
    def is_complete(self) -> bool:
        """Whether a thread needs no more bytes to serve the request."""
        return bool(self._parser.is_complete)

    @property
    def rejection(self) -> HTTPStatus | None:
        """The status of a request that is malformed or too large, else None."""
        if self._invalid:
            return self._invalid
        if max(self._parser.content_length or 0, self._body_bytes) > body.MAX_BYTES:
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        if self.is_complete or len(self.received) <= HEAD_MAX_BYTES + body.MAX_BYTES:
            return None
        # Small chunks have more framing than content.
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE if self._has_head else HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE

    def add(self, data: bytes) -> None:
        """Take the next bytes of the connection. Those behind the request stay in ``received`` too."""
        self.received += data
        try:
            self._parser.feed(data)
        except (ParseError, ValueError) as error:  # ValueError: a number with too many digits for Python
            self._invalid = STATUSES.get(type(error), HTTPStatus.BAD_REQUEST)

    def must_continue(self) -> bool:
        """Whether the client waits for ``100 Continue`` before it sends the body: true once per request."""
        waits = self._has_head and not self.is_complete and (b"expect", b"100-continue") in self._parser.headers
        is_first, self._is_continued = waits and not self._is_continued, waits
        return is_first

    def _end_head(self) -> bool:
        self._has_head = True
        return False  # the body is parsed too

    def _count(self, chunk: bytes) -> None:
        self._body_bytes += len(chunk)


class Worker(ThreadWorker):  # type: ignore[misc]
    """gunicorn's ``gthread`` with buffered requests.

    A connection is in one of these places: arriving, in a thread, kept alive (by gunicorn), lingering. Only the main
    loop changes its place.
    """

    request_timeout_s = 10.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Both in the order of their deadlines, because each has one constant time.
        self._arriving: dict[Connection, Arrival] = {}
        self._lingering: dict[Connection, float] = {}

    # Overridden methods of gunicorn -------------------------------------------------------------------------------

    def enqueue_req(self, conn: Connection) -> None:
        """Called for a new connection, for a kept-alive one that is readable, and for one with pipelined bytes."""
        arrival = self._arriving[conn] = Arrival(time.monotonic() + self.request_timeout_s)
        conn.sock.setblocking(False)
        if conn.parser is None:
            # A parser without a socket: a thread that finds less than a whole request ends the connection.
            conn.parser = RequestParser(self.cfg, iter(()), conn.client)
            conn.initialized = conn.data_ready = True
        else:
            arrival.add(conn.parser.unreader.take_buffered())
        self._receive(conn)  # most requests are there already, and are never watched
        if conn in self._arriving:
            self._watch(conn, self._receive)

    def handle_request(self, req: Any, conn: Connection) -> bool:
        """Serve a request, in a thread."""
        req._expected_100_continue = False  # sent before the body arrived
        conn.sock.settimeout(self.request_timeout_s)  # for the whole response
        try:
            return bool(super().handle_request(req, conn))
        except TimeoutError:
            self.log.warning("response not read in time: %s", _peer(conn))
            return False

    def finish_request(self, conn: Connection, future: Any) -> None:
        """Keep the connection alive, or close it without blocking the main loop, as gunicorn's own method would."""
        if not future.cancelled() and future.exception() is None and future.result():
            super().finish_request(conn, future)
        else:
            self._linger(conn)

    def murder_pending(self) -> None:
        """End what is overdue. The main loop calls this at least once a second."""
        now_s = time.monotonic()
        while self._arriving:
            conn, arrival = next(iter(self._arriving.items()))
            if arrival.deadline_s > now_s:
                break
            if arrival.received:
                self._reject(conn, HTTPStatus.REQUEST_TIMEOUT)
            else:
                self._close(conn)
        while self._lingering:
            conn, deadline_s = next(iter(self._lingering.items()))
            if deadline_s > now_s:
                break
            self._close(conn)

    # The places of a connection -----------------------------------------------------------------------------------

    def _receive(self, conn: Connection, _: Any = None) -> None:
        """Take what has arrived, and give a whole request to a thread."""
        arrival = self._arriving[conn]
        if not arrival.is_complete and not arrival.rejection:
            data = self._read(conn)
            if data is None:
                return
            if not data:
                self._close(conn)
                return
            arrival.add(data)
        if status := arrival.rejection:
            self._reject(conn, status)
        elif arrival.is_complete:
            self._forget(conn)
            conn.parser.unreader.unread(bytes(arrival.received))
            super().enqueue_req(conn)
        elif arrival.must_continue():
            self._send(conn, CONTINUE)

    def _reject(self, conn: Connection, status: HTTPStatus) -> None:
        self.log.warning("request rejected: %s, %s", status.value, _peer(conn))
        problem = problems.dump(problems.of_status(status, status.description)).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nConnection: close\r\n"
            f"Content-Type: {problems.MEDIA_TYPE}\r\nContent-Length: {len(problem)}\r\n\r\n"
        )
        self._send(conn, head.encode() + problem)
        self._forget(conn)
        self._linger(conn)

    def _linger(self, conn: Connection) -> None:
        """End our side, and read on until the client has ended its side. A reset would destroy an unread response."""
        try:
            conn.sock.shutdown(SHUT_WR)
        except OSError:
            self._close(conn)
            return
        conn.sock.setblocking(False)
        self._lingering[conn] = time.monotonic() + LINGER_S
        self._watch(conn, self._discard)

    def _discard(self, conn: Connection, _: Any) -> None:
        if self._read(conn) == b"":
            self._close(conn)

    def _close(self, conn: Connection) -> None:
        self._forget(conn)
        self.nr_conns -= 1
        conn.close()

    def _watch(self, conn: Connection, callback: Any) -> None:
        self.poller.register(conn.sock, EVENT_READ, partial(callback, conn))

    def _forget(self, conn: Connection) -> None:
        self._arriving.pop(conn, None)
        self._lingering.pop(conn, None)
        with suppress(KeyError):  # not watched
            self.poller.unregister(conn.sock)

    @staticmethod
    def _read(conn: Connection) -> bytes | None:
        """Some bytes; none if the connection has ended; None if there is nothing to read yet."""
        try:
            return bytes(conn.sock.recv(RECEIVE_BYTES))
        except BlockingIOError:
            return None
        except OSError:
            return b""

    @staticmethod
    def _send(conn: Connection, data: bytes) -> None:
        """A few bytes fit into the socket's buffer; a client that has filled it before gets none."""
        with suppress(OSError):
            conn.sock.send(data)


def _peer(conn: Connection) -> str:
    return str(conn.client[0] if isinstance(conn.client, tuple) else conn.client)
