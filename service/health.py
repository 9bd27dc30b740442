"""For orchestrators and Prometheus: is the process alive, can it serve, what does it count. No token is asked."""

from __future__ import annotations

from http import HTTPStatus

from flask import Response
from flask_openapi3.blueprint import APIBlueprint
from sqlalchemy import Engine
from werkzeug.exceptions import ServiceUnavailable

from outbox.migrations.migrate import is_current
from service.metrics import Metrics
from service.problems import RETRY_AFTER_S, responses
from service.schemas import Health


def health_api(engine: Engine, metrics: Metrics) -> APIBlueprint:
    """The routes of the orchestrator."""
    api = APIBlueprint("health", __name__, abp_responses=responses(HTTPStatus.INTERNAL_SERVER_ERROR))

    @api.get("/healthz", responses={HTTPStatus.OK: Health})
    def healthz() -> Response:
        """Whether the process answers; says nothing of the database, so that its absence restarts nobody."""
        return _ok()

    @api.get("/readyz", responses={HTTPStatus.OK: Health, **responses(HTTPStatus.SERVICE_UNAVAILABLE)})
    def readyz() -> Response:
        """Whether the database answers and has the schema of this version."""
        with engine.connect() as connection:
            if not is_current(connection, "source"):
                raise ServiceUnavailable("the schema lacks migrations: `outbox migrate`", retry_after=RETRY_AFTER_S)
        return _ok()

    @api.get("/metrics", doc_ui=False)
    def read_metrics() -> Response:
        """Prometheus' text format."""
        return metrics.render()

    return api


def _ok() -> Response:
    return Response(Health().model_dump_json(), mimetype="application/json")
