"""The public API for a FastAPI service that writes events: coroutines around the same core as `outbox.web` for Flask.

    @api.post("/orders", status_code=HTTPStatus.CREATED, response_model=Order, responses=WRITING)
    async def make_order(header: WriteHeaders, body: NewOrder) -> Response:
        return (await service.answer(header, body, place)).response("/orders")

All SQL is the core's: SQLAlchemy's asyncio runs it by ``run_sync``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outbox.base.settings import Settings
from outbox.http import body, change, gate, problems
from outbox.http.async_database import make_async_engine
from outbox.http.change import (
    KEY_DESCRIPTION,
    KEY_PATTERN,
    TRACEPARENT_DESCRIPTION,
    BaseChange,
    BaseService,
    Key,
    first_answer,
)
from outbox.http.gate import Health, Metrics, Token
from outbox.http.problems import READING, WRITING, FieldError, Kind, Kinds, Problem, responses
from outbox.writing.event import Event

__all__ = ["READING", "SECURITY", "WRITING", "Change", "Kind", "Service", "WriteHeaders", "responses"]

# For /openapi.json alone: every path requires the token, `Gate` checks it.
SECURITY = [Depends(HTTPBearer(scheme_name=gate.SCHEME, auto_error=False))]
PUBLIC = ("/healthz", "/readyz", "/metrics", "/openapi.json", "/docs")
PAGE = "fastapi_offline"  # the package that has what the page of the API loads

B = TypeVar("B")


@dataclass(frozen=True)
class Headers:
    """The headers of a request that changes something, and that request."""

    request: Request
    idempotency_key: str
    traceparent: str | None


async def _headers(
    request: Request,
    idempotency_key: Annotated[str, Header(alias="Idempotency-Key", pattern=KEY_PATTERN, description=KEY_DESCRIPTION)],
    traceparent: Annotated[str | None, Header(description=TRACEPARENT_DESCRIPTION)] = None,
) -> Headers:
    return Headers(request, idempotency_key, traceparent)


WriteHeaders = Annotated[Headers, Depends(_headers)]


@dataclass(frozen=True)
class Answer(change.Answer):
    """The response to a request: HTTP status and JSON."""

    def response(self, collection: str = "") -> Response:
        """As FastAPI sends it. If it has made something, ``Location`` says where in ``collection`` that is, by its
        id.
        """
        return Response(self.body, self.status, headers=self.headers(collection))


class Change(BaseChange[AsyncConnection]):
    """One change, in its transaction."""

    @cached_property
    def session(self) -> AsyncSession:
        """An ORM session on the connection. It is flushed at the end of a change that has claimed its key."""
        return AsyncSession(self.connection, expire_on_commit=False, join_transaction_mode="rollback_only")

    async def claim(self, made: BaseModel, status: HTTPStatus = HTTPStatus.CREATED) -> bool:
        """Claim the request's key for this answer, before anything is written: `outbox.web.Change.claim`."""
        return await self.connection.run_sync(self._claim, made, status)

    async def append(self, *events: Event) -> None:
        """Append events to the outbox (`outbox.aio.append`).

        An event without a traceparent gets that of the request.
        """
        await self.connection.run_sync(self._append, *events)


class Service(BaseService):
    """A service and its database. Nothing connects before the first request that needs it."""

    def __init__(self, title: str, settings: Settings | None = None, refusals: Kinds | None = None) -> None:
        """``refusals`` are the exceptions by which the service refuses a request, and the problem that each becomes."""
        super().__init__(title, settings, refusals)
        self.engine: AsyncEngine = make_async_engine(self.settings)

    def app(self, *routers: APIRouter) -> FastAPI:
        """The ASGI application: the routes of a service, health and metrics routes, and ``/openapi.json``.

        Every path requires the bearer token, except those in ``PUBLIC``. Every error is a problem (RFC 9457). Raises
        Failure if the settings have no token: a service is never open by default.
        """

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield
            await self.engine.dispose()

        app = Application(
            title=self._title,
            version="1",
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            dependencies=[Depends(_check_body)],
            lifespan=lifespan,
            telemetry={"tracing": False},  # `Gate` makes the span of a request, as for Flask
        )
        app.add_middleware(Gate, token=Token(self.settings), metrics=self.metrics, refusals=self._refusals)
        app.add_exception_handler(HTTPException, _respond_to_starlette)
        app.add_exception_handler(RequestValidationError, _respond_to_invalid)
        for router in routers:  # FastAPI describes an error of its own where a route does not describe one
            app.include_router(router, responses=responses(HTTPStatus.UNPROCESSABLE_ENTITY))
        app.include_router(_health(self))
        _show_api(app)
        return app

    async def answer(self, header: Headers, body: B, change: Callable[[Change, B], Awaitable[None]]) -> Answer:
        """Make a change in a transaction of its own, within a request: `outbox.web.Service.answer`."""
        request = header.request
        key = Key.of_request(
            header.idempotency_key,
            self.settings.idempotency_ttl_hours,
            method=request.method,
            route=_template(request.scope) or "",
            path=request.scope["path"],
            query=request.scope["query_string"],
            body=await request.body(),
        )
        try:
            async with self.engine.begin() as connection:
                made = Change(connection, key, header.traceparent)
                await change(made, body)
                if not made.claimed.is_repeated and "session" in vars(made):
                    await made.session.flush()
                return Answer(**vars(made.claimed))
        except tuple(self._refusals) as refusal:
            async with self.engine.begin() as connection:
                return Answer(**vars(await connection.run_sync(first_answer, key, self._refused(refusal))))


class Application(FastAPI):
    """FastAPI, whose /openapi.json describes every error as a problem."""

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            schema = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            super().openapi()["components"]["schemas"] |= {**schema.pop("$defs"), Problem.__name__: schema}
        return self.openapi_schema or {}


class Gate:
    """Around every request: the token on every path, unknown ones included, the trace, metrics, and a problem for each
    exception.
    """

    def __init__(self, app: ASGIApp, token: Token, metrics: Metrics, refusals: Kinds) -> None:
        self._app, self._token, self._metrics, self._refusals = app, token, metrics, refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request, path, received_bytes, has_responded = Request(scope), scope["path"], 0, False
        is_public = request.method in ("GET", "HEAD") and (path in PUBLIC or path.startswith("/docs/"))

        async def receive_some() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > body.MAX_BYTES:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return message

        async def send_observed(message: Message) -> None:
            nonlocal has_responded
            if message["type"] == "http.response.start":
                has_responded, location = True, dict(message["headers"]).get(b"location")
                respond(_template(scope), message["status"], location and location.decode())
            await send(message)

        traceparent = request.headers.get("traceparent")
        with gate.passing(self._metrics, request.method, path, traceparent, is_public=is_public) as respond:
            try:
                if not is_public:
                    self._token.require(request.headers.get("Authorization"))
                await self._app(scope, receive_some, send_observed)
            except Exception as error:
                if has_responded:
                    raise
                await _response(*problems.of_error(error, self._refusals))(scope, receive, send_observed)


def _template(scope: Scope) -> str | None:
    """The template of the matched route with the prefixes of its routers, as ``/v1/orders/{order_id}``.

    ``scope["route"]`` lacks the prefixes; FastAPI keeps the whole path beside it.
    """
    included = scope.get("fastapi", {}).get("effective_route_context")
    path: str | None = getattr(included or scope.get("route"), "path", None)
    return path


def _response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    return Response(problems.dump(problem), problem.status, dict(headers or {}), problems.MEDIA_TYPE)


async def _respond_to_starlette(_: Request, error: Exception) -> Response:
    """Keep the status and headers (Allow) of an HTTPException."""
    assert isinstance(error, HTTPException)  # noqa: S101 - it is registered for that
    detail = error.detail if error.detail != HTTPStatus(error.status_code).phrase else None
    return _response(problems.of_status(error.status_code, detail), error.headers)


async def _respond_to_invalid(_: Request, error: Exception) -> Response:
    """The response to a request with invalid fields. It names each of them."""
    assert isinstance(error, RequestValidationError)  # noqa: S101 - it is registered for that
    found = error.errors()
    if any(one["type"] == "json_invalid" for one in found):
        return _response(problems.of_status(HTTPStatus.BAD_REQUEST, body.NOT_JSON))
    errors = [FieldError(field=".".join(map(str, one["loc"][1:])), detail=one["msg"]) for one in found]
    return _response(problems.of_fields(errors))


async def _check_body(request: Request) -> None:
    body.check(
        method=request.method,
        content_type=request.headers.get("Content-Type", ""),
        body=await request.body(),
        path=request.path_params,
        texts=[*request.query_params.multi_items(), *request.cookies.items()],
        takes_body=getattr(request.scope["route"], "body_field", None) is not None,
    )


def _show_api(app: FastAPI) -> None:
    """Serve the page of the API at /docs/swagger, where the package of the page is: no image has it."""
    package = find_spec(PAGE)
    if package is None or package.origin is None:
        return
    app.mount("/docs/static", StaticFiles(directory=Path(package.origin).with_name("static")))

    @app.get("/docs", include_in_schema=False)
    @app.get("/docs/swagger", include_in_schema=False)  # as with Flask
    async def page() -> Response:
        shown = get_swagger_ui_html(
            openapi_url="/openapi.json",
            title=app.title,
            swagger_js_url="/docs/static/swagger-ui-bundle.js",
            swagger_css_url="/docs/static/swagger-ui.css",
            swagger_favicon_url="/docs/static/favicon.png",
        )
        shown.headers.update(gate.PAGE_POLICY)
        return shown


def _health(service: Service) -> APIRouter:
    """The routes ``/healthz``, ``/readyz`` and ``/metrics``, without a token: for orchestrators and Prometheus."""
    api = APIRouter(tags=["health"], responses=responses(HTTPStatus.INTERNAL_SERVER_ERROR))

    @api.get("/healthz")
    async def healthz() -> Health:
        """Whether the process responds. It ignores the database, so that a database outage restarts no process."""
        return Health()

    @api.get("/readyz", responses=responses(HTTPStatus.SERVICE_UNAVAILABLE))
    async def readyz() -> Health:
        """Whether the database responds and has the schema of this version."""
        async with service.engine.connect() as connection:
            await connection.run_sync(gate.require_current)
        return Health()

    @api.get("/metrics", include_in_schema=False)
    async def read_metrics(request: Request) -> Response:
        return Response(service.metrics.render(request.headers.get("host", "")), media_type=CONTENT_TYPE_LATEST)

    return api
