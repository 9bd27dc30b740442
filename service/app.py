"""The composition root: settings in, WSGI application out."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from flask import Flask, request
from flask_openapi3.models.info import Info
from flask_openapi3.openapi import OpenAPI
from werkzeug.exceptions import BadRequest, UnsupportedMediaType

from outbox.base import settings as configuration
from outbox.base.settings import Settings
from service import auth, problems, trace
from service.database import make_engine
from service.health import health_api
from service.metrics import Metrics
from service.routes import ledger_api
from service.schemas import Problem

BODY_MAX_BYTES = 16 * 1024
PUBLIC = {"health.healthz", "health.readyz", "health.read_metrics", "openapi"}


def create_app(settings: Settings | None = None) -> Flask:
    """The ledger service. Connects to the database at the first request that needs it.

    Raises Failure if the settings have no token.
    """
    settings = settings or configuration.load()
    engine = make_engine(settings)
    metrics = Metrics()
    app = OpenAPI(
        __name__,
        static_folder=None,
        info=Info(title="Ledger", version="1"),
        security_schemes=auth.SECURITY_SCHEMES,
        doc_ui=False,
        validation_error_callback=problems.invalid,
        validation_error_model=Problem,
        # The library documents its own error on each route that lacks this status; all of ours have it.
        validation_error_status=HTTPStatus.INTERNAL_SERVER_ERROR.value,
    )
    app.config["MAX_CONTENT_LENGTH"] = BODY_MAX_BYTES
    metrics.register(app)  # first, so that refused requests are counted too
    trace.register(app)
    auth.register(app, settings, public=PUBLIC)
    problems.register(app)
    app.before_request(_require_json)
    app.register_api(ledger_api(engine, metrics, settings))
    app.register_api(health_api(engine, metrics))

    @app.route("/openapi.json")
    def openapi() -> dict[str, Any]:
        return app.api_doc

    return app


def _require_json() -> None:
    """Tell a body that is no JSON object (400, 415) apart from one whose fields are wrong (422)."""
    if request.method != "POST" or request.url_rule is None:
        return
    try:
        body = request.get_json()
    except (BadRequest, RecursionError):
        raise BadRequest("the body is no JSON") from None
    except UnsupportedMediaType:
        raise UnsupportedMediaType("the Content-Type must be application/json") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object")
