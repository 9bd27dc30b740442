"""The WSGI application of a service: its routes, the token, traces, metrics and health."""

from __future__ import annotations

import hmac
import os
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from importlib.util import find_spec
from typing import Any, Literal

import structlog
from flask import Blueprint, Flask, Response, abort, g, request
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.info import Info
from flask_openapi3.openapi import OpenAPI
from flask_openapi3.types import SecuritySchemesDict
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from pydantic import BaseModel
from sqlalchemy import Engine
from werkzeug.datastructures import WWWAuthenticate
from werkzeug.exceptions import ServiceUnavailable, Unauthorized

from outbox.base import log, scraped, trace
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.http import body, problems
from outbox.http.problems import Kind, Problem, responses
from outbox.migrations.migrate import is_current

SCHEME = "bearer"
# For /openapi.json: the scheme, and the requirement of a route.
SECURITY_SCHEMES: SecuritySchemesDict = {SCHEME: {"type": "http", "scheme": SCHEME}}
SECURITY: list[dict[str, list[str]]] = [{SCHEME: []}]
PUBLIC = {"health.healthz", "health.readyz", "health.read_metrics", "openapi", "swagger.swagger", "swagger.static"}
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # prometheus_client reads it when it is imported

logger = log.get(__name__)


class Metrics:
    """The metrics of one application, summed over gunicorn's workers.

    `http_request_duration_seconds`: a histogram of every completed request, by method, route template and status; its
    count is the number of requests. A service adds its own metrics to ``registry``.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Histogram(
            "http_request_duration_seconds",
            "Duration of requests by method, route and status",
            ["method", "route", "status"],
            registry=self.registry,
        )

    def render(self) -> Response:
        """All metrics in Prometheus' text format."""
        registry = self.registry
        if FOLDER_VARIABLE in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)


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
    request that needs it. Raises Failure if the settings have no token: a service is never open by default.
    """
    app = OpenAPI(
        __name__,
        static_folder=None,
        info=Info(title=title, version="1"),
        security_schemes=SECURITY_SCHEMES,
        doc_ui=False,
        validation_error_callback=problems.invalid,
        validation_error_model=Problem,
        # flask-openapi3 adds its own error to each route that lacks this status. All our routes declare 500.
        validation_error_status=HTTPStatus.INTERNAL_SERVER_ERROR.value,
    )
    _measure(app, metrics)  # first, so that rejected requests are counted too
    _trace(app)
    _require_token(app, settings)
    problems.register(app, refusals or {})
    body.register(app)
    for api in [*apis, _health(engine, metrics)]:
        app.register_api(api)

    @app.route("/openapi.json")
    def openapi() -> dict[str, Any]:
        return app.api_doc

    _show_api(app)
    return app


def _show_api(app: Flask) -> None:
    """Serve the page of the API below /docs, where the package of the page is: no image has it.

    All that the page loads is in the package. The browser refuses other hosts.
    """
    if find_spec("flask_openapi3_swagger") is None:
        return
    from flask_openapi3_swagger.plugins import RegisterPlugin

    page: Blueprint = RegisterPlugin.register("/openapi.json")

    @page.after_request
    def stay_here(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = "default-src 'self' 'unsafe-inline' data:"
        return response

    app.config["SWAGGER_CONFIG"] = {"validatorUrl": None}
    app.register_blueprint(page, url_prefix="/docs")


def _measure(app: Flask, metrics: Metrics) -> None:
    @app.before_request
    def start() -> None:
        g.started_at_s = time.monotonic()

    @app.after_request
    def observe(response: Response) -> Response:
        # The route template instead of the path, and known methods only: clients must not create label values.
        route = request.url_rule.rule if request.url_rule else "unknown"
        method = request.method if request.method in METHODS else "other"
        duration_s = time.monotonic() - g.started_at_s
        metrics.requests.labels(method, route, response.status_code).observe(duration_s)
        return response


def _trace(app: Flask) -> None:
    """Bind the trace id of a request to its log lines, and log the response of a sampled request.

    The response is logged after the commit. If the process ends in between, the line is missing.
    """

    @app.before_request
    def bind() -> None:
        trace_id = trace.trace_id(request.headers.get("traceparent"))
        if trace_id is not None:
            structlog.contextvars.bind_contextvars(trace_id=trace_id)

    @app.after_request
    def log_sampled(response: Response) -> Response:
        if trace.is_sampled(request.headers.get("traceparent")):
            logger.info(
                "request completed",
                method=request.method,
                path=request.path,
                status=response.status_code,
                location=response.headers.get("Location"),
            )
        return response

    @app.teardown_request
    def unbind(_: BaseException | None) -> None:
        structlog.contextvars.unbind_contextvars("trace_id")  # the thread will serve other requests


def _require_token(app: Flask, settings: Settings) -> None:
    """Require the token on every path, unknown paths included, except for the endpoints in ``PUBLIC``."""
    token = settings.service_token.get_secret_value().encode()
    if not token:
        raise Failure(
            "OUTBOX_SERVICE_TOKEN is not set",
            "`outbox up` generates one, or set your own",
            code="service-token-missing",
        )

    @app.before_request
    def require_token() -> None:
        if request.endpoint in PUBLIC:
            return
        sent = request.authorization
        sent_token = sent.token if sent is not None and sent.type == SCHEME else None
        if sent_token is None or not hmac.compare_digest(sent_token.encode(), token):
            raise Unauthorized(
                "the bearer token is missing or wrong", www_authenticate=WWWAuthenticate(SCHEME, {"realm": "service"})
            )


class Health(BaseModel):
    """The response of a healthy service; an unhealthy one responds with an error."""

    status: Literal["ok"] = "ok"


def _health(engine: Engine, metrics: Metrics) -> APIBlueprint:
    """The routes ``/healthz``, ``/readyz`` and ``/metrics``, without a token: for orchestrators and Prometheus."""
    api = APIBlueprint("health", __name__, abp_responses=responses(HTTPStatus.INTERNAL_SERVER_ERROR))

    @api.get("/healthz", responses={HTTPStatus.OK: Health})
    def healthz() -> dict[str, str]:
        """Whether the process responds. It ignores the database, so that a database outage restarts no process."""
        return Health().model_dump()

    @api.get("/readyz", responses={HTTPStatus.OK: Health, **responses(HTTPStatus.SERVICE_UNAVAILABLE)})
    def readyz() -> dict[str, str]:
        """Whether the database responds and has the schema of this version."""
        with engine.connect() as connection:
            if not is_current(connection, "source"):
                raise ServiceUnavailable(
                    "the database lacks migrations: run `outbox migrate`", retry_after=problems.RETRY_AFTER_S
                )
        return Health().model_dump()

    @api.get("/metrics", doc_ui=False)
    def read_metrics() -> Response:
        if not scraped.is_own_name(request.host):
            abort(HTTPStatus.MISDIRECTED_REQUEST, scraped.REFUSAL)
        return metrics.render()

    return api
