"""The HTTP side of the page: static files, one stream of server-sent events, and what changes something."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from flask import Flask, Response, abort, request
from werkzeug.serving import BaseWSGIServer, make_server

from demo.page.hub import Hub
from demo.page.security import Guard

JSON = "application/json"
BODY_MAX = 1_000


class Desk:
    """Requests of the page. The player answers."""

    def act(self, name: str) -> bool:
        """Begin an action; False if something else is being done, or if this chain cannot do it.

        Raises KeyError if there is no such action.
        """
        raise NotImplementedError

    def lesson(self, verb: str) -> bool:
        """Play, pause, resume or step the lesson; False if it cannot now. Raises KeyError for another verb."""
        raise NotImplementedError

    def look_up(self, event_id: str) -> dict[str, Any] | None:
        """The outbox row and the records of an event; None if it is not known."""
        raise NotImplementedError


def create_app(hub: Hub, desk: Desk, guard: Guard) -> Flask:
    """The application."""
    app = Flask("demo.page", static_folder="static", static_url_path="/static")
    app.config["MAX_CONTENT_LENGTH"] = BODY_MAX
    guard.protect(app)

    @app.get("/")
    def index() -> Response:
        return app.send_static_file("index.html")

    @app.get("/api/stream")
    def stream() -> Response:
        return Response(hub.subscribe(), mimetype="text/event-stream")

    @app.get("/api/events/<path:event_id>")
    def event(event_id: str) -> Response:
        found = desk.look_up(event_id)
        if found is None:
            abort(HTTPStatus.NOT_FOUND)
        return Response(json.dumps(found), mimetype=JSON)

    @app.post("/api/act")
    def act() -> Response:
        return _accepted(lambda: desk.act(str(_body().get("action"))))

    @app.post("/api/lesson")
    def lesson() -> Response:
        return _accepted(lambda: desk.lesson(str(_body().get("verb"))))

    return app


class Server:
    """Serves an application on one port until it is stopped. Port 0: a free one."""

    def __init__(self, host: str, port: int) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server: BaseWSGIServer = make_server(host, port, Flask("not yet"), threaded=True)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="page-server", daemon=True)

    def start(self, app: Flask) -> None:
        """Begin to answer."""
        self._server.app = app
        self._thread.start()

    def stop(self) -> None:
        """Answer no more."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def _accepted(do: Callable[[], bool]) -> Response:
    """202 if it begins, 409 if it cannot now, 404 if there is no such thing."""
    try:
        begins = do()
    except KeyError:
        abort(HTTPStatus.NOT_FOUND)
    return Response(status=HTTPStatus.ACCEPTED if begins else HTTPStatus.CONFLICT)


def _body() -> dict[str, Any]:
    found = request.get_json(silent=True)
    return found if isinstance(found, dict) else {}
