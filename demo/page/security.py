"""Who may ask for what: this host alone, with the token, from the page itself.

- The name in the request's header Host must be one of this host. A page elsewhere whose name is made to point here (DNS
  rebinding) has another one.
- The address that the demo prints has the token behind ``#``, which browsers do not send. The page exchanges it for a
  cookie, which scripts cannot read and other sites cannot make a browser send.
- What changes anything must be sent by the page itself: the header Origin says so.
"""

from __future__ import annotations

import hmac
import os
import secrets
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

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
OPEN = {"index", "static", "session"}  # endpoints without the cookie: they hold nothing of the chain


class Guard:
    """The token, and the checks of every request."""

    def __init__(self, token: str, port: int) -> None:
        """Raises ValueError if the token is empty: it would let everybody in."""
        if not token:
            raise ValueError("an empty token")
        self.token = token
        self._cookie = f"page-{port}"  # cookies do not know ports

    def protect(self, app: Flask) -> None:
        """Check each request of the application, and add the headers to each response."""
        app.before_request(self._check)
        app.after_request(_add_headers)

    def admit(self, token: object) -> Response:
        """Exchange the token for the cookie."""
        if not isinstance(token, str) or not self._is_ours(token):
            abort(HTTPStatus.FORBIDDEN)
        response = Response(status=HTTPStatus.NO_CONTENT)
        response.set_cookie(self._cookie, self.token, httponly=True, samesite="Strict")
        return response

    def _check(self) -> None:
        if request.host.rpartition(":")[0] not in HOSTS:
            abort(HTTPStatus.MISDIRECTED_REQUEST)
        if request.method not in ("GET", "HEAD") and request.headers.get("Origin") != f"http://{request.host}":
            abort(HTTPStatus.FORBIDDEN)
        if request.endpoint not in OPEN and not self._is_ours(request.cookies.get(self._cookie, "")):
            abort(HTTPStatus.UNAUTHORIZED)

    def _is_ours(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(errors="surrogatepass"), self.token.encode())


def kept_token(file: Path) -> str:
    """The token in a file that its owner alone can read. It is made once, so that an open page lives on when the server
    starts again.

    The file is there whole or not at all. An empty one, as a full disk may leave it, is made again. Where no file can
    be made, as in a container whose folders belong to another user, the token is new each time.
    """
    try:
        if not _is_whole(file):
            _make(file)
        return file.read_text()
    except OSError:
        return _new_token()


def _new_token() -> str:
    return secrets.token_urlsafe(24)


def _make(file: Path) -> None:
    staging = file.with_name(f"{file.name}.{os.getpid()}")
    staging.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
            made.write(_new_token())
        with suppress(FileExistsError):  # another demo was first
            os.link(staging, file)
    finally:
        staging.unlink(missing_ok=True)


def _is_whole(file: Path) -> bool:
    """Whether there is a token. An empty file is deleted."""
    if file.exists() and not file.stat().st_size:
        file.unlink()
    return file.exists()


def _add_headers(response: Response) -> Response:
    response.headers.update(HEADERS)
    return response
