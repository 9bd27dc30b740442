"""Authentication: clients send the bearer token."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from flask import Flask, request
from flask_openapi3.types import SecuritySchemesDict
from werkzeug.datastructures import WWWAuthenticate
from werkzeug.exceptions import Unauthorized

from outbox.base.errors import Failure
from outbox.base.settings import Settings

SCHEME = "bearer"
REALM = "service"
# For /openapi.json: the scheme, and the requirement of a route.
SECURITY_SCHEMES: SecuritySchemesDict = {SCHEME: {"type": "http", "scheme": SCHEME}}
SECURITY: list[dict[str, list[str]]] = [{SCHEME: []}]


def register(app: Flask, settings: Settings, public: Collection[str]) -> None:
    """Require the token on every path, unknown paths included, except for endpoints in ``public``.

    Raises Failure if no token is set: a service is never open by default.
    """
    token = settings.service_token.get_secret_value().encode()
    if not token:
        raise Failure(
            "OUTBOX_SERVICE_TOKEN is not set",
            "`outbox up` generates one, or set your own",
            code="service-token-missing",
        )

    @app.before_request
    def require_token() -> None:
        if request.endpoint in public:
            return
        sent = request.authorization
        sent_token = sent.token if sent is not None and sent.type == SCHEME else None
        if sent_token is None or not hmac.compare_digest(sent_token.encode(), token):
            raise Unauthorized(
                "the bearer token is missing or wrong", www_authenticate=WWWAuthenticate(SCHEME, {"realm": REALM})
            )
