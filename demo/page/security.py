"""Who may ask for what: this host alone, with the token.

- The name in the request's header Host must be one of this host. A page elsewhere whose name is made to point here (DNS
  rebinding) has another one.
- The address that the demo prints has the token behind ``#``, which browsers do not send. The page sends it in a
  header. No other page can: a browser adds a cookie to requests of others, and for every port of the host, but not a
  header. Each start has a token of its own.
"""

from __future__ import annotations

import hmac
import secrets
from http import HTTPStatus

from flask import Flask, Response, abort, request

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "worker-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
HOSTS = {"127.0.0.1", "localhost", "[::1]"}  # with any port: a container publishes another one
OPEN = {"index", "static"}  # endpoints without the token: they hold nothing of the chain


class Guard:
    """The token, and the checks of every request."""

    def __init__(self, token: str = "") -> None:
        """Without a token: a new one."""
        self.token = token or secrets.token_urlsafe(24)

    def protect(self, app: Flask) -> None:
        """Check each request of the application, and add the headers to each response."""
        app.before_request(self._check)
        app.after_request(_add_headers)

    def _check(self) -> None:
        if request.host.rpartition(":")[0] not in HOSTS:
            abort(HTTPStatus.MISDIRECTED_REQUEST)
        sent = request.authorization
        token = sent.token if sent is not None and sent.type == "bearer" and sent.token else ""
        if request.endpoint not in OPEN and not hmac.compare_digest(token.encode(), self.token.encode()):
            abort(HTTPStatus.UNAUTHORIZED)


def _add_headers(response: Response) -> Response:
    response.headers.update(HEADERS)
    return response
