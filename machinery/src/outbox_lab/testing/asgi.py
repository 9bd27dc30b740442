"""An application of a project for tests in this process: WSGI as it is, and ASGI on a loop of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from gunicorn.asgi.lifespan import LifespanManager  # type: ignore[import-untyped]

from outbox.base.wait import timeout_scale
from outbox.http.worker import is_asgi

T = TypeVar("T")
ANSWER_TIMEOUT_S = 60

Application = Callable[..., Any]
"""A Flask or a FastAPI application, or any other WSGI or ASGI one."""


@contextmanager
def as_wsgi(app: Application) -> Iterator[Application]:
    """The application as WSGI, until the end of the block. ASGI's runs on one loop, in a thread, within its lifespan.

    So one client, werkzeug's, speaks to both, and an asyncio engine belongs to one loop, however many threads ask.
    """
    if not is_asgi(app):
        yield app
        return
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        thread = threading.Thread(target=loop.run_forever, name="asgi", daemon=True)
        thread.start()
        lifespan = LifespanManager(app, logging.getLogger(__name__))
        try:
            _run(loop, lifespan.startup())
            yield partial(_respond, app, loop)
            _run(loop, lifespan.shutdown())
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


def _run(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, loop).result(ANSWER_TIMEOUT_S * timeout_scale())


def _respond(
    app: Application, loop: asyncio.AbstractEventLoop, environ: dict[str, Any], start_response: Callable[..., object]
) -> list[bytes]:
    """One request and its whole response, as a WSGI application gives it."""
    sent: list[dict[str, Any]] = []
    waiting = [{"type": "http.request", "body": environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))}]

    async def receive() -> dict[str, Any]:
        return waiting.pop() if waiting else await loop.create_future()  # the client stays

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    _run(loop, app(_scope(environ), receive, send))
    start, *rest = sent
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in start["headers"]]
    start_response(f"{start['status']} {HTTPStatus(start['status']).phrase}", headers)
    return [message["body"] for message in rest]


def _scope(environ: dict[str, Any]) -> dict[str, Any]:
    named = {name.removeprefix("HTTP_"): value for name, value in environ.items() if name.startswith("HTTP_")}
    named |= {name: environ[name] for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)}
    path = environ["PATH_INFO"].encode("latin-1")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": environ["REQUEST_METHOD"],
        "scheme": environ["wsgi.url_scheme"],
        "path": path.decode(errors="replace"),
        "raw_path": path,
        "root_path": "",
        "query_string": environ.get("QUERY_STRING", "").encode("latin-1"),
        "headers": [
            (name.lower().replace("_", "-").encode(), value.encode("latin-1")) for name, value in named.items()
        ],
        "server": (environ["SERVER_NAME"], int(environ["SERVER_PORT"])),
    }
