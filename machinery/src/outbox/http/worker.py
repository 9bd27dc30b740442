"""A gunicorn worker whose application never waits for a client: WSGI in threads, ASGI on the loop.

gunicorn's own ``gthread`` worker reads a request, and writes its response, in the thread that serves it. So a few
clients that send half a request, or do not read, hold all threads, and gunicorn expects a buffering proxy in front of
it. This worker is that buffer: its loop receives every request and sends every response, and a thread has the whole
request, and gives the whole response. So does the coroutine of an ASGI application: no response is streamed.

Bounds per worker process: `CONNECTIONS` connections, and for each about `HEAD_MAX_BYTES` plus `body.MAX_BYTES`, or one
response, and twice `BUFFER_BYTES` in the system, each way. For one client more, the client that the worker has waited
for the longest is disconnected. A request that takes longer than ``request_timeout_s`` to arrive gets 408; a client
that takes longer to read its response is disconnected; after SIGTERM both have `LINGER_S`. TLS ends in front of the
service. docs/architecture.md says why no other server does.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from http.client import responses
from itertools import islice
from typing import Any, cast
from urllib.parse import unquote_to_bytes

from gunicorn.asgi.lifespan import LifespanManager  # type: ignore[import-untyped]
from gunicorn.asgi.parser import (  # type: ignore[import-untyped]
    LimitRequestHeaders,
    LimitRequestLine,
    ParseError,
    PythonProtocol,
)
from gunicorn.http import wsgi  # type: ignore[import-untyped]
from gunicorn.http.parser import RequestParser  # type: ignore[import-untyped]
from gunicorn.workers import base  # type: ignore[import-untyped]

from outbox.base import project, spans
from outbox.http import body, problems

CONNECTIONS = 500  # with the files of the process below 1024, the usual limit of open files
HEAD_MAX_BYTES = 32 * 1024
LINGER_S = 2.0  # after the last response, for the client to close its side; after SIGTERM, for every client
RECEIVE_BYTES = BUFFER_BYTES = 64 * 1024
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: drop what the client has not read

# Every other error of the parser is 400.
STATUSES = {
    LimitRequestLine: HTTPStatus.REQUEST_URI_TOO_LONG,
    LimitRequestHeaders: HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
}

Address = tuple[str, int]


class Arrival:
    """One request, as much of it as has arrived."""

    def __init__(self) -> None:
        self.received = bytearray()
        self._parser = PythonProtocol(on_headers_complete=self._end_head, on_body=self._count)
        self._has_head = False
        self._body_bytes = 0
        self._is_continued = False
        self.invalid: HTTPStatus | None = None

    @property
    def is_complete(self) -> bool:
        """Whether a thread needs no more bytes to serve the request."""
        return bool(self._parser.is_complete)

    @property
    def rejection(self) -> HTTPStatus | None:
        """The status of a request that is malformed, too large or late, else None."""
        if self.invalid:
            return self.invalid
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
            self.invalid = STATUSES.get(type(error), HTTPStatus.BAD_REQUEST)

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


class Response(bytearray):
    """A response as gunicorn writes it: in place of a socket."""

    def sendall(self, data: bytes) -> None:
        self.extend(data)

    def gettimeout(self) -> float:
        return 0.0


class Worker(base.Worker):  # type: ignore[misc]
    """A loop that waits for all clients, and threads that run the application."""

    request_timeout_s = 10.0

    def run(self) -> None:
        """Serve until SIGTERM. gunicorn calls this once the application is loaded."""
        self._threads = ThreadPoolExecutor(self.cfg.threads)
        self._is_asgi, self._state = is_asgi(self.wsgi), dict[str, Any]()
        self._clients = set[asyncio.Task[None]]()
        self._served = set[asyncio.Task[None]]()  # calls of an ASGI application
        self._waiting = dict[asyncio.Task[None], asyncio.Timeout]()  # clients that are waited for, the longest first
        with spans.exported(f"{project.current().topic_prefix}-service"):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop, stopping = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, stopping.set)
        lifespan = LifespanManager(self.wsgi, self.log, self._state)
        if self._is_asgi:
            await lifespan.startup()
        accepting = asyncio.gather(*(self._accept(listener.sock) for listener in self.sockets))
        accepting.add_done_callback(lambda _: stopping.set())
        while not stopping.is_set() and self.ppid == os.getppid():
            self.notify()
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), 1)
        self.alive = False
        accepting.cancel()
        with suppress(asyncio.CancelledError):
            await accepting  # raises why nothing can be accepted
        for limit in self._waiting.values():
            if not limit.expired():
                limit.reschedule(loop.time() + LINGER_S)
        if under_way := self._clients | self._served:
            await asyncio.wait(under_way, timeout=self.cfg.graceful_timeout)
        if self._is_asgi:
            await lifespan.shutdown()

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # of each connection; the system's own grow to megabytes
            listener.setsockopt(socket.SOL_SOCKET, buffer, BUFFER_BYTES)
        server = listener.getsockname()
        while True:
            with suppress(ConnectionAbortedError):
                client, address = await asyncio.get_running_loop().sock_accept(listener)
                while len(self._clients) >= CONNECTIONS:
                    for longest in islice(self._waiting, 1):
                        longest.cancel()
                    await asyncio.wait(self._clients, timeout=1, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.create_task(self._talk(client, address, server))
                self._clients.add(task)
                task.add_done_callback(self._clients.discard)

    async def _talk(self, client: socket.socket, address: Address, server: Address) -> None:
        """Serve the requests of a connection, one after another."""
        rest, is_kept = b"", True
        loop = asyncio.get_running_loop()
        with client, suppress(OSError):  # the client may end the connection at any time
            while is_kept:
                arrival = await self._receive(client, rest)
                if status := arrival.rejection:
                    self.log.warning("request rejected: %s, %s", status.value, address[0])
                    response, is_kept = _rejection(status), False
                elif arrival.is_complete:
                    request = bytes(arrival.received)
                    if self._is_asgi:
                        response, is_kept, rest = await self._await_response(request, address, server)
                    else:
                        response, is_kept, rest = await loop.run_in_executor(
                            self._threads, self._respond, request, address, server
                        )
                else:
                    return
                try:
                    async with self._wait(self.request_timeout_s):
                        await loop.sock_sendall(client, response)
                except (TimeoutError, asyncio.CancelledError):
                    self.log.warning("response not read in time: %s", address[0])
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    return
            # Closed now, a connection with unread bytes would be reset, and the client might not get the response.
            client.shutdown(socket.SHUT_WR)
            async with self._wait(LINGER_S):
                while await loop.sock_recv(client, RECEIVE_BYTES):
                    pass

    async def _receive(self, client: socket.socket, rest: bytes) -> Arrival:
        """The next request, of which ``rest`` is here. It stays incomplete if the client sends nothing or has gone."""
        loop, arrival, data = asyncio.get_running_loop(), Arrival(), rest
        try:
            if not data:
                async with self._wait(self.request_timeout_s):
                    data = await loop.sock_recv(client, RECEIVE_BYTES)
            async with self._wait(self.request_timeout_s):
                while data:
                    arrival.add(data)
                    if arrival.is_complete or arrival.rejection:
                        break
                    if arrival.must_continue():
                        await loop.sock_sendall(client, CONTINUE)
                    data = await loop.sock_recv(client, RECEIVE_BYTES)
        except TimeoutError:
            if arrival.received:
                arrival.invalid = HTTPStatus.REQUEST_TIMEOUT
        return arrival

    @asynccontextmanager
    async def _wait(self, limit_s: float) -> AsyncIterator[None]:
        """Wait for a client, no longer than this. It may be disconnected meanwhile, to make room for another."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            async with asyncio.timeout(limit_s if self.alive else LINGER_S) as self._waiting[task]:
                yield
        finally:
            del self._waiting[task]

    def _respond(self, received: bytes, client: Address, server: Address) -> tuple[bytes, bool, bytes]:
        """Run the WSGI application, in a thread: the response, whether the connection is kept, and the bytes behind
        the request.
        """
        exchange = Exchange(self, received, client, server)
        with exchange.recovered():
            made, environ = exchange.begin()
            environ["wsgi.multithread"] = True
            parts = self.wsgi(environ, made.start_response)
            try:
                for part in parts:
                    made.write(part)
                made.close()
            finally:
                if hasattr(parts, "close"):
                    parts.close()
        return exchange.end()

    async def _await_response(self, received: bytes, client: Address, server: Address) -> tuple[bytes, bool, bytes]:
        """Run the ASGI application, until it has responded: what `_respond` returns for WSGI."""
        exchange = Exchange(self, received, client, server)
        with exchange.recovered():
            made, _ = exchange.begin()
            responded = asyncio.get_running_loop().create_future()
            waiting = [{"type": "http.request", "body": exchange.request.body.read()}]

            async def receive() -> dict[str, Any]:
                if waiting:
                    return waiting.pop()
                await asyncio.wait({responded})
                return {"type": "http.disconnect"}

            async def send(message: dict[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
                    made.start_response(f"{message['status']} {responses.get(message['status'], '')}", headers)
                elif not responded.done():
                    made.write(message.get("body", b""))
                    if not message.get("more_body"):
                        made.close()
                        responded.set_result(None)

            serving = asyncio.create_task(self.wsgi({**exchange.scope(), "state": dict(self._state)}, receive, send))
            self._served.add(serving)
            serving.add_done_callback(self._served.discard)
            await asyncio.wait({serving, responded}, return_when=asyncio.FIRST_COMPLETED)
            if not responded.done():
                serving.result()
                raise RuntimeError("the application has sent no response")
            serving.add_done_callback(self._log_failure)  # of what it does after its response
        return exchange.end()

    def _log_failure(self, serving: asyncio.Task[None]) -> None:
        if not serving.cancelled() and (error := serving.exception()):
            self.log.error("after the response: %r", error, exc_info=error)


class Exchange:
    """One request that has arrived, and its response."""

    def __init__(self, worker: Worker, received: bytes, client: Address, server: Address) -> None:
        self._worker, self._client, self._server = worker, client, server
        self._parser = RequestParser(worker.cfg, iter([received]), client)
        self._response, self._is_kept = Response(), False
        self.request: Any = None
        self._made: Any = None

    def begin(self) -> tuple[Any, dict[str, Any]]:
        """gunicorn's response, which writes into ours, and the request as WSGI's environment."""
        self.request = next(self._parser)
        self.request._expected_100_continue = False  # sent before the body arrived
        self._made, environ = wsgi.create(self.request, self._response, self._client, self._server, self._worker.cfg)
        if not self._worker.alive:
            self._made.force_close()
        return self._made, environ

    def scope(self) -> dict[str, Any]:
        """The request as ASGI's scope."""
        request, raw_path = self.request, self.request.path.encode("latin-1")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": ".".join(map(str, request.version)),
            "method": request.method,
            "scheme": request.scheme,
            "path": unquote_to_bytes(raw_path).decode(errors="replace"),
            "raw_path": raw_path,
            "root_path": "",
            "query_string": request.query.encode("latin-1"),
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in request.headers],
            "client": self._client[:2],
            "server": self._server[:2],
        }

    @contextmanager
    def recovered(self) -> Iterator[None]:
        """Respond to an exception of the application, or of the request, as gunicorn does."""
        try:
            yield
            self._is_kept = not self._made.should_close() and self._parser.finish_body()
        except Exception as error:
            self._response, self._is_kept = Response(), False
            self._worker.handle_error(self.request, self._response, self._client, error)

    def end(self) -> tuple[bytes, bool, bytes]:
        """The response, whether the connection is kept, and the bytes behind the request."""
        return bytes(self._response), self._is_kept, self._parser.unreader.take_buffered()


def is_asgi(application: Any) -> bool:
    """Whether an application is ASGI's, whose call is a coroutine."""
    return inspect.iscoroutinefunction(application) or inspect.iscoroutinefunction(type(application).__call__)


def _rejection(status: HTTPStatus) -> bytes:
    problem = problems.dump(problems.of_status(status)).encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nConnection: close\r\n"
        f"Content-Type: {problems.MEDIA_TYPE}\r\nContent-Length: {len(problem)}\r\n\r\n"
    )
    return head.encode() + problem
