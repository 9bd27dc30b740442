"""Routes for orchestrators and Prometheus, without a token: liveness, readiness, metrics."""

from __future__ import annotations

from http import HTTPStatus
from typing import Literal

from flask import Response, abort, request
from flask_openapi3.blueprint import APIBlueprint
from pydantic import BaseModel
from sqlalchemy import Engine
from werkzeug.exceptions import ServiceUnavailable

from outbox.base import scraped
from outbox.http.metrics import Metrics
from outbox.http.problems import RETRY_AFTER_S, responses
from outbox.migrations.migrate import is_current


class Health(BaseModel):
    """The response of a healthy service; an unhealthy one responds with an error."""

    status: Literal["ok"] = "ok"


def health_api(engine: Engine, metrics: Metrics) -> APIBlueprint:
    """The routes ``/healthz``, ``/readyz`` and ``/metrics``."""
    api = APIBlueprint("health", __name__, abp_responses=responses(HTTPStatus.INTERNAL_SERVER_ERROR))

    @api.get("/healthz", responses={HTTPStatus.OK: Health})
    def healthz() -> Response:
        """Whether the process responds. It ignores the database, so that a database outage restarts no process."""
        return _ok()

    @api.get("/readyz", responses={HTTPStatus.OK: Health, **responses(HTTPStatus.SERVICE_UNAVAILABLE)})
    def readyz() -> Response:
        """Whether the database responds and has the schema of this version."""
        with engine.connect() as connection:
            if not is_current(connection, "source"):
                raise ServiceUnavailable(
                    "the database lacks migrations: run `outbox migrate`", retry_after=RETRY_AFTER_S
                )
        return _ok()

    @api.get("/metrics", doc_ui=False)
    def read_metrics() -> Response:
        """All metrics in Prometheus' text format."""
        if not scraped.is_own_name(request.host):
            abort(HTTPStatus.MISDIRECTED_REQUEST, scraped.REFUSAL)
        return metrics.render()

    return api


def _ok() -> Response:
    return Response(Health().model_dump_json(), mimetype="application/json")
