"""The public API for a Flask service that writes events: its database, its metrics, and its answers to requests.

    service = Service("Orders", refusals={SoldOut: Kind(HTTPStatus.CONFLICT, "/problems/sold-out", "Sold out")})
    api = APIBlueprint("orders", __name__, abp_security=SECURITY)

    @api.post("/orders", responses={HTTPStatus.CREATED: Order, **WRITING})
    def make_order(header: WriteHeaders, body: NewOrder) -> Response:
        return service.answer(header, body, place).response("/orders")

    def place(change: Change, wanted: NewOrder) -> None:
        order = Order(id=uuid4(), **dict(wanted))
        if change.claim(order):
            change.connection.execute(...)
            change.append(Event("order", str(order.id), "placed", {...}))

    app = service.app(api)

The order of work in a change is: lock, decide, claim the key, write. `outbox.asgi` is for FastAPI.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from importlib.util import find_spec
from typing import Any, TypeVar

from flask import Blueprint, Flask, Response, current_app, g, request
from flask.json.provider import DefaultJSONProvider
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.info import Info
from flask_openapi3.openapi import OpenAPI
from flask_openapi3.types import SecuritySchemesDict
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError
from sqlalchemy import Connection, Engine
from werkzeug.exceptions import HTTPException

from outbox.base.settings import Settings
from outbox.http import body, change, gate, problems
from outbox.http.change import BaseChange, BaseService, Key, WriteHeaders, first_answer
from outbox.http.database import make_engine
from outbox.http.gate import Health, Metrics, Token
from outbox.http.problems import READING, WRITING, FieldError, Kind, Kinds, Problem, responses
from outbox.writing.event import Event

__all__ = ["READING", "SECURITY", "WRITING", "Change", "Kind", "Service", "WriteHeaders", "responses"]

# For /openapi.json: the scheme, and the requirement of a route.
SECURITY_SCHEMES: SecuritySchemesDict = {gate.SCHEME: {"type": "http", "scheme": gate.SCHEME}}
SECURITY: list[dict[str, list[str]]] = [{gate.SCHEME: []}]
PUBLIC = {"health.healthz", "health.readyz", "health.read_metrics", "openapi", "swagger.swagger", "swagger.static"}
BODY_PARAMETERS = {"body", "form", "raw"}  # of a route that takes a body

B = TypeVar("B")


@dataclass(frozen=True)
class Answer(change.Answer):
    """The response to a request: HTTP status and JSON."""

    def response(self, collection: str = "") -> Response:
        """As Flask sends it. If it has made something, ``Location`` says where in ``collection`` that is, by its id."""
        return Response(self.body, self.status, headers=self.headers(collection))


class Change(BaseChange[Connection]):
    """One change, in its transaction."""

    def claim(self, made: BaseModel, status: HTTPStatus = HTTPStatus.CREATED) -> bool:
        """Claim the request's key for this answer, before anything is written.

        False if the key is taken: then write nothing, because the client gets the first answer. Raises KeyReused if
        another request has claimed the key, and ValueError for an answer that JSON cannot express, such as NaN.
        """
        return self._claim(self.connection, made, status)

    def append(self, *events: Event) -> None:
        """Append events to the outbox (`outbox.writing.append.append`).

        An event without a traceparent gets that of the request.
        """
        self._append(self.connection, *events)


class Service(BaseService):
    """A service and its database. Nothing connects before the first request that needs it."""

    def __init__(self, title: str, settings: Settings | None = None, refusals: Kinds | None = None) -> None:
        """``refusals`` are the exceptions by which the service refuses a request, and the problem that each becomes."""
        super().__init__(title, settings, refusals)
        self.engine: Engine = make_engine(self.settings)

    def app(self, *apis: APIBlueprint) -> Flask:
        """The WSGI application: the routes of a service, health and metrics routes, and ``/openapi.json``.

        Every route requires the bearer token, except those in ``PUBLIC``. Every error is a problem (RFC 9457). Raises
        Failure if the settings have no token: a service is never open by default.
        """
        app = OpenAPI(
            __name__,
            static_folder=None,
            info=Info(title=self._title, version="1"),
            security_schemes=SECURITY_SCHEMES,
            doc_ui=False,
            validation_error_callback=_invalid,
            validation_error_model=Problem,
            # flask-openapi3 adds its own error to each route that lacks this status. All our routes declare 500.
            validation_error_status=HTTPStatus.INTERNAL_SERVER_ERROR.value,
        )
        _guard(app, self.metrics, Token(self.settings))  # first, so that rejected requests are counted too
        _show_problems(app, self._refusals)
        _check_bodies(app)
        for api in [*apis, _health(self)]:
            app.register_api(api)
        app.add_url_rule("/openapi.json", "openapi", lambda: app.api_doc)
        _show_api(app)
        return app

    def answer(self, header: WriteHeaders, body: B, change: Callable[[Change, B], None]) -> Answer:
        """Make a change in a transaction of its own, within a request. The answer is stored under the request's key, in
        that transaction.

        ``change`` gets ``body``, which may hold whatever the route has taken from the request. A retry is recognised by
        the request itself: its method, path, query and JSON body.

        The order in ``change`` is: lock, decide, claim, write. A refusal that it raises rolls everything back, and is
        stored under the key too. Raises KeyReused if another request has claimed the key.
        """
        key = Key.of_request(
            header.idempotency_key,
            self.settings.idempotency_ttl_hours,
            method=request.method,
            route=str(request.url_rule),
            path=request.path,
            query=request.query_string,
            body=request.get_data(),
        )
        try:
            with self.engine.begin() as connection:
                made = Change(connection, key, header.traceparent)
                change(made, body)
                return Answer(**vars(made.claimed))
        except tuple(self._refusals) as refusal:
            with self.engine.begin() as connection:
                return Answer(**vars(first_answer(connection, key, self._refused(refusal))))


def _show_api(app: Flask) -> None:
    """Serve the page of the API below /docs, where the package of the page is: no image has it."""
    if find_spec("flask_openapi3_swagger") is None:
        return
    from flask_openapi3_swagger.plugins import RegisterPlugin

    page: Blueprint = RegisterPlugin.register("/openapi.json")

    @page.after_request
    def stay_here(response: Response) -> Response:
        response.headers.update(gate.PAGE_POLICY)
        return response

    app.config["SWAGGER_CONFIG"] = {"validatorUrl": None}
    app.register_blueprint(page, url_prefix="/docs")


def _guard(app: Flask, metrics: Metrics, token: Token) -> None:
    """Measure and trace every request, and require the token on every path, unknown paths included, except for the
    endpoints in ``PUBLIC``.
    """

    @app.before_request
    def enter() -> None:
        is_public, traceparent = request.endpoint in PUBLIC, request.headers.get("traceparent")
        g.stack = ExitStack()
        passing = gate.passing(metrics, request.method, request.path, traceparent, is_public=is_public)
        g.respond = g.stack.enter_context(passing)
        if not is_public:
            token.require(request.headers.get("Authorization"))

    @app.after_request
    def respond(response: Response) -> Response:
        route = request.url_rule.rule if request.url_rule else None
        g.respond(route, response.status_code, response.headers.get("Location"))
        return response

    @app.teardown_request
    def leave(_: BaseException | None) -> None:
        if "stack" in g:
            g.stack.close()


def _show_problems(app: Flask, refusals: Kinds) -> None:
    """Respond to every error with a problem; ``refusals`` are the exceptions that the service declares."""

    @app.errorhandler(Exception)
    def respond(error: Exception) -> Response:
        problem, headers = problems.of_error(error, refusals)
        return _response(problem, headers)

    @app.errorhandler(HTTPException)
    def respond_to_werkzeug(error: HTTPException) -> Response:
        """Keep werkzeug's status and headers (Allow, Retry-After, WWW-Authenticate)."""
        if problems.kind_of(error, refusals):
            return respond(error)
        # werkzeug's default descriptions are written for people with browsers.
        detail = error.description if error.description != type(error).description else None
        problem = problems.of_status(error.code or HTTPStatus.INTERNAL_SERVER_ERROR, detail)
        return _response(problem, {name: value for name, value in error.get_headers() if name != "Content-Type"})


def _response(problem: Problem, headers: Mapping[str, str]) -> Response:
    return Response(problems.dump(problem), problem.status, mimetype=problems.MEDIA_TYPE, headers=headers)


def _invalid(error: ValidationError) -> Response:
    """The response to a request with invalid fields. It names each of them."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    errors = [FieldError(field=".".join(map(str, one["loc"])), detail=one["msg"]) for one in found]
    return _response(problems.of_fields(errors), {})


class StrictJson(DefaultJSONProvider):
    """Flask's JSON. It reads what `outbox.http.body.check` has accepted."""

    def dumps(self, obj: Any, **options: Any) -> str:
        """Encode a response. Raises ValueError for NaN and infinity, which no reader of JSON takes."""
        return super().dumps(obj, allow_nan=False, **options)


def _check_bodies(app: Flask) -> None:
    app.json = StrictJson(app)
    app.config["MAX_CONTENT_LENGTH"] = body.MAX_BYTES

    @app.before_request
    def check() -> None:
        if request.url_rule is None:
            return
        body.check(
            method=request.method,
            content_type=request.content_type or "",
            body=request.get_data(),
            path=request.view_args or {},
            texts=[*request.args.items(multi=True), *request.cookies.items(multi=True)],
            takes_body=_takes_body(current_app.view_functions[str(request.endpoint)]),
        )


@cache
def _takes_body(route: Callable[..., object]) -> bool:
    return bool(BODY_PARAMETERS & inspect.signature(route).parameters.keys())


def _health(service: Service) -> APIBlueprint:
    """The routes ``/healthz``, ``/readyz`` and ``/metrics``, without a token: for orchestrators and Prometheus."""
    api = APIBlueprint("health", __name__, abp_responses=responses(HTTPStatus.INTERNAL_SERVER_ERROR))

    @api.get("/healthz", responses={HTTPStatus.OK: Health})
    def healthz() -> dict[str, str]:
        """Whether the process responds. It ignores the database, so that a database outage restarts no process."""
        return Health().model_dump()

    @api.get("/readyz", responses={HTTPStatus.OK: Health, **responses(HTTPStatus.SERVICE_UNAVAILABLE)})
    def readyz() -> dict[str, str]:
        """Whether the database responds and has the schema of this version."""
        with service.engine.connect() as connection:
            gate.require_current(connection)
        return Health().model_dump()

    @api.get("/metrics", doc_ui=False)
    def read_metrics() -> Response:
        return Response(service.metrics.render(request.host), content_type=CONTENT_TYPE_LATEST)

    return api
