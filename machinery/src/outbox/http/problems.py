"""Errors as application/problem+json (RFC 9457), and their descriptions in /openapi.json."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

from flask import Flask, Response
from flask_openapi3.types import ResponseDict
from pydantic import BaseModel, Field, ValidationError
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.exceptions import HTTPException, InternalServerError, ServiceUnavailable

from outbox.base import log
from outbox.http.database import is_unavailable
from outbox.http.idempotency import PROBLEM, KeyReused

MEDIA_TYPE = PROBLEM
RETRY_AFTER_S = 1
UNAVAILABLE = (
    "the database is unavailable and the outcome of the request is unknown;"
    " repeat the request with the same Idempotency-Key, if it has one"
)

logger = log.get(__name__)


class FieldError(BaseModel):
    """One invalid field."""

    field: str = Field(description="its name; empty for the whole body")
    detail: str


class Problem(BaseModel):
    """An error in the form of RFC 9457 (application/problem+json)."""

    type: str = Field("about:blank", description="distinguishes errors of the same status")
    title: str
    status: int
    detail: str
    errors: list[FieldError] | None = Field(None, description="the invalid fields")


class Kind(NamedTuple):
    """A type of problem that a service declares."""

    status: HTTPStatus
    type: str
    title: str


KEY_REUSED = Kind(HTTPStatus.CONFLICT, "/problems/idempotency-key-reused", "Idempotency-Key reused")


def of_kind(kind: Kind, detail: str) -> Problem:
    return Problem(type=kind.type, title=kind.title, status=kind.status, detail=detail)


def of_status(status: int, detail: str, errors: list[FieldError] | None = None) -> Problem:
    """A problem without a type of its own: the HTTP status says enough."""
    return Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, errors=errors)


def dump(problem: Problem) -> str:
    return problem.model_dump_json(exclude_none=True)


def respond(problem: Problem) -> Response:
    return Response(dump(problem), problem.status, mimetype=MEDIA_TYPE)


def invalid(error: ValidationError) -> Response:
    """The response to a request with invalid fields. It names each of them."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return invalid_fields([FieldError(field=".".join(map(str, one["loc"])), detail=one["msg"]) for one in found])


def invalid_fields(errors: list[FieldError]) -> Response:
    """The response to a request with these invalid fields."""
    named = ", ".join(one.field or "the body" for one in errors)
    return respond(of_status(HTTPStatus.UNPROCESSABLE_ENTITY, f"invalid: {named}", errors))


def responses(*statuses: HTTPStatus) -> ResponseDict:
    """The descriptions of these errors in /openapi.json."""
    content = {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}}
    return {status: {"description": status.phrase, "content": content} for status in statuses}


# The errors of every route that reads, and of every route that takes a body.
_ALWAYS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE)
READING = responses(*_ALWAYS, HTTPStatus.NOT_FOUND)
WRITING = responses(
    *_ALWAYS,
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)


def register(app: Flask, refusals: Mapping[type[Exception], Kind]) -> None:
    """Respond to every error with a problem; ``refusals`` are the exceptions that the service declares."""
    kinds: dict[type[Exception], Kind] = {KeyReused: KEY_REUSED, **refusals}
    for type_, kind in kinds.items():
        app.register_error_handler(type_, lambda error, kind=kind: respond(of_kind(kind, str(error))))
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(SQLAlchemyError, _database_error)
    app.register_error_handler(Exception, _unexpected)


def _http_error(error: HTTPException) -> Response:
    """Keep werkzeug's status and headers (Allow, Retry-After, WWW-Authenticate)."""
    status = HTTPStatus(error.code or HTTPStatus.INTERNAL_SERVER_ERROR)
    # werkzeug's default descriptions are written for people with browsers.
    detail = error.description if error.description != type(error).description else None
    response = respond(of_status(status, detail or status.description))
    response.headers.extend((name, value) for name, value in error.get_headers() if name != "Content-Type")
    return response


def _database_error(error: SQLAlchemyError) -> Response:
    if not is_unavailable(error):
        return _unexpected(error)
    logger.warning("database unavailable", error=str(error).splitlines()[0])
    return _http_error(ServiceUnavailable(UNAVAILABLE, retry_after=RETRY_AFTER_S))


def _unexpected(error: Exception) -> Response:
    logger.error("unexpected error", exc_info=error)
    return _http_error(InternalServerError("unexpected error; see the log of the service"))
