"""Errors as application/problem+json (RFC 9457), and their descriptions in /openapi.json. Of no framework."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple

from pydantic import BaseModel, Field
from sqlalchemy.exc import SQLAlchemyError

from outbox.base import log
from outbox.http.database import is_unavailable

MEDIA_TYPE = "application/problem+json"
RETRY_LATER = {"Retry-After": "1"}
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


Kinds = Mapping[type[Exception], Kind]
KEY_REUSED = Kind(HTTPStatus.CONFLICT, "/problems/idempotency-key-reused", "Idempotency-Key reused")


class KeyReused(Exception):
    def __init__(self) -> None:
        super().__init__("the Idempotency-Key was used for another request")


class HttpError(Exception):
    """An error of a request, with its problem and the headers of the response."""

    def __init__(self, problem: Problem, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(problem.detail)
        self.problem, self.headers = problem, dict(headers or {})


def of_status(status: int, detail: str | None = None, errors: list[FieldError] | None = None) -> Problem:
    """A problem without a type of its own: the HTTP status says enough, also as the detail."""
    known = HTTPStatus(status)
    return Problem(title=known.phrase, status=status, detail=detail or known.description, errors=errors)


def of_fields(errors: list[FieldError]) -> Problem:
    """The problem of a request with these invalid fields."""
    named = ", ".join(one.field or "the body" for one in errors)
    return of_status(HTTPStatus.UNPROCESSABLE_ENTITY, f"invalid: {named}", errors)


def kind_of(error: Exception, kinds: Kinds) -> Kind | None:
    """The problem that is declared for an error's class, or for the nearest class above."""
    return next((kinds[type_] for type_ in type(error).__mro__ if type_ in kinds), None)


def of_error(error: Exception, kinds: Kinds) -> tuple[Problem, dict[str, str]]:
    """The problem of an error in a route, and further headers. An error that nobody declared is logged, and is 500."""
    kind = kind_of(error, {KeyReused: KEY_REUSED, **kinds})
    if kind is not None:
        return Problem(type=kind.type, title=kind.title, status=kind.status, detail=str(error)), {}
    if isinstance(error, HttpError):
        return error.problem, error.headers
    if isinstance(error, SQLAlchemyError) and is_unavailable(error):
        logger.warning("database unavailable", error=str(error).splitlines()[0])
        return of_status(HTTPStatus.SERVICE_UNAVAILABLE, UNAVAILABLE), RETRY_LATER
    logger.error("unexpected error", exc_info=error)
    return of_status(HTTPStatus.INTERNAL_SERVER_ERROR, "unexpected error; see the log of the service"), {}


def dump(problem: Problem) -> str:
    return problem.model_dump_json(exclude_none=True)


def responses(*statuses: HTTPStatus) -> dict[Any, Any]:
    """The descriptions of these errors in /openapi.json."""
    content = {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}}
    return {int(status): {"description": status.phrase, "content": content} for status in statuses}


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
