"""Every error as application/problem+json (RFC 9457), and what /openapi.json says of it."""

from __future__ import annotations

from http import HTTPStatus
from typing import NamedTuple

from flask import Flask, Response
from flask_openapi3.types import ResponseDict
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.exceptions import HTTPException, InternalServerError, ServiceUnavailable

from outbox.base import log
from service.database import is_unavailable
from service.idempotency import KeyReused
from service.ledger import BalanceOutOfRange, CurrencyMismatch, InsufficientFunds, Refusal, UnknownAccount
from service.schemas import FieldError, Problem

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1
AWAY = (
    "the database is away and the outcome is unknown: repeat the request, a transfer with the same Idempotency-Key,"
    " which makes it once"
)


class Kind(NamedTuple):
    """How a refusal of the ledger is told."""

    status: HTTPStatus
    type: str
    title: str


REFUSALS: dict[type[Refusal], Kind] = {
    UnknownAccount: Kind(HTTPStatus.NOT_FOUND, "/problems/unknown-account", "Unknown account"),
    CurrencyMismatch: Kind(HTTPStatus.CONFLICT, "/problems/currency-mismatch", "Currency mismatch"),
    InsufficientFunds: Kind(HTTPStatus.CONFLICT, "/problems/insufficient-funds", "Insufficient funds"),
    BalanceOutOfRange: Kind(HTTPStatus.CONFLICT, "/problems/balance-out-of-range", "Balance out of range"),
}
KEY_REUSED = Kind(HTTPStatus.CONFLICT, "/problems/idempotency-key-reused", "Idempotency-Key reused")

logger = log.get(__name__)


def of_refusal(refusal: Refusal) -> Problem:
    """The problem that a refusal of the ledger is."""
    return of_kind(REFUSALS[type(refusal)], str(refusal))


def of_kind(kind: Kind, detail: str) -> Problem:
    """A problem of a kind of ours."""
    return Problem(type=kind.type, title=kind.title, status=kind.status, detail=detail)


def of_status(status: int, detail: str, errors: list[FieldError] | None = None) -> Problem:
    """A problem that its HTTP status says enough of."""
    return Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, errors=errors)


def dump(problem: Problem) -> str:
    """The problem as JSON."""
    return problem.model_dump_json(exclude_none=True)


def respond(problem: Problem) -> Response:
    """The problem as a response."""
    return Response(dump(problem), problem.status, mimetype=MEDIA_TYPE)


def invalid(error: ValidationError) -> Response:
    """The answer to a request whose fields are wrong: each is named."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    errors = [FieldError(field=".".join(map(str, one["loc"])), detail=one["msg"]) for one in found]
    named = ", ".join(one.field or "the body" for one in errors)
    return respond(of_status(HTTPStatus.UNPROCESSABLE_ENTITY, f"invalid: {named}", errors))


def responses(*statuses: HTTPStatus) -> ResponseDict:
    """What /openapi.json says of these errors."""
    content = {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}}
    return {status: {"description": status.phrase, "content": content} for status in statuses}


def register(app: Flask) -> None:
    """Make the application answer every error this way."""
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(KeyReused, _key_reused)
    app.register_error_handler(SQLAlchemyError, _database_error)
    app.register_error_handler(Exception, _unexpected)


def _http_error(error: HTTPException) -> Response:
    """Status and headers (Allow, Retry-After, WWW-Authenticate) stay those of werkzeug."""
    status = HTTPStatus(error.code or HTTPStatus.INTERNAL_SERVER_ERROR)
    # What werkzeug says by itself is meant for people with browsers.
    said = error.description if error.description != type(error).description else None
    response = respond(of_status(status, said or status.description))
    response.headers.extend((name, value) for name, value in error.get_headers() if name != "Content-Type")
    return response


def _key_reused(_: KeyReused) -> Response:
    return respond(of_kind(KEY_REUSED, "the Idempotency-Key was used for another request"))


def _database_error(error: SQLAlchemyError) -> Response:
    if not is_unavailable(error):
        return _unexpected(error)
    logger.warning("database away", error=str(error).splitlines()[0])
    return _http_error(ServiceUnavailable(AWAY, retry_after=RETRY_AFTER_S))


def _unexpected(error: Exception) -> Response:
    logger.error("unexpected error", exc_info=error)
    return _http_error(InternalServerError("unexpected error; the service's log has it"))
