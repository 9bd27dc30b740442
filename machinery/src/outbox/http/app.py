"""Assemble the WSGI application of a service from its routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from flask import Flask
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.info import Info
from flask_openapi3.openapi import OpenAPI
from sqlalchemy import Engine

from outbox.base.settings import Settings
from outbox.http import auth, body, problems, trace
from outbox.http.health import health_api
from outbox.http.metrics import Metrics
from outbox.http.problems import Kind, Problem

PUBLIC = {"health.healthz", "health.readyz", "health.read_metrics", "openapi"}


def make_app(
    settings: Settings,
    engine: Engine,
    metrics: Metrics,
    *,
    title: str,
    apis: Sequence[APIBlueprint],
    refusals: Mapping[type[Exception], Kind] | None = None,
) -> Flask:
    """The application of a service: its routes, health and metrics routes, and ``/openapi.json``.

    Every route requires the bearer token, except those in ``PUBLIC``. Every error is a problem (RFC 9457); ``refusals``
    says which problem each exception of the service's rules becomes. Nothing connects to the database before the first
    request that needs it. Raises Failure if the settings have no token.
    """
    app = OpenAPI(
        __name__,
        static_folder=None,
        info=Info(title=title, version="1"),
        security_schemes=auth.SECURITY_SCHEMES,
        doc_ui=False,
        validation_error_callback=problems.invalid,
        validation_error_model=Problem,
        # flask-openapi3 adds its own error to each route that lacks this status. All our routes declare 500.
        validation_error_status=HTTPStatus.INTERNAL_SERVER_ERROR.value,
    )
    metrics.register(app)  # first, so that rejected requests are counted too
    trace.register(app)
    auth.register(app, settings, public=PUBLIC)
    problems.register(app, refusals or {})
    body.register(app)
    for api in [*apis, health_api(engine, metrics)]:
        app.register_api(api)

    @app.route("/openapi.json")
    def openapi() -> dict[str, Any]:
        return app.api_doc

    return app
