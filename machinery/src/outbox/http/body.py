"""Requests: a body is one JSON object in UTF-8, of a limited size, and every text is one that a database holds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from outbox.events.references import loads
from outbox.http import problems
from outbox.http.problems import FieldError, HttpError

MAX_BYTES = 16 * 1024
METHODS = {"POST", "PUT", "PATCH"}
NO_FIELD_DETAIL = "this route takes no fields"
# Postgres has no text with U+0000; a lone surrogate is no character, and UTF-8 has no bytes for it.
UNSTORABLE = re.compile("[\0\ud800-\udfff]")
UNSTORABLE_DETAIL = "contains U+0000 or a lone surrogate, which no database holds"
JSON_TYPE = re.compile(r"application/(json|.*\+json)")
NOT_JSON = "the body is not valid JSON in UTF-8 with unique keys"


def check(
    *,
    method: str,
    content_type: str,
    body: bytes,
    path: Mapping[str, object],
    texts: Iterable[tuple[str, str]],
    takes_body: bool,
) -> None:
    """Require that every body is one JSON object. Raises HttpError 400, 413 or 415 otherwise; a wrong field is 422.

    ``path`` are the decoded parameters in the path, ``texts`` those of the query, and the cookies. ``takes_body``: the
    route has a parameter for the body. A route without one takes a request without a body, of any content type, and an
    empty object; any field is 422. A text that Postgres has no text for is no value of any field: 422 in a body, a
    query or a cookie, 404 in a path.
    """
    takes_body = takes_body and method in METHODS
    fields = _object(content_type, body) if takes_body or body else {}
    for name, value in path.items():
        if isinstance(value, str) and UNSTORABLE.search(value):
            raise _error(HTTPStatus.NOT_FOUND, f"path: {name} {UNSTORABLE_DETAIL}")
    every: list[tuple[str, object]] = [*texts, ("", fields)]
    _refuse(dict.fromkeys(field for name, value in every for field in _unstorable(name, value)), UNSTORABLE_DETAIL)
    if method in METHODS and not takes_body:
        _refuse(fields, NO_FIELD_DETAIL)


def _object(content_type: str, body: bytes) -> dict[str, Any]:
    if len(body) > MAX_BYTES:
        raise _error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {MAX_BYTES} bytes")
    if not JSON_TYPE.fullmatch(content_type.partition(";")[0].strip().lower()):
        raise _error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the Content-Type must be application/json")
    try:
        found = loads(body)
    except (ValueError, RecursionError):
        raise _error(HTTPStatus.BAD_REQUEST, NOT_JSON) from None
    if not isinstance(found, dict):
        raise _error(HTTPStatus.BAD_REQUEST, "the body is not a JSON object")
    return found


def _error(status: HTTPStatus, detail: str) -> HttpError:
    return HttpError(problems.of_status(status, detail))


def _refuse(fields: Mapping[str, object], detail: str) -> None:
    if fields:
        raise HttpError(problems.of_fields([FieldError(field=name, detail=detail) for name in fields]))


def _unstorable(name: str, value: object) -> Iterator[str]:
    """The fields within a value whose texts no database holds. A property of such a name is named by its object."""
    waiting = [(name, value)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, str):
            if UNSTORABLE.search(value):
                yield name
            continue
        inner = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
        for key, one in inner.items():
            if UNSTORABLE.search(str(key)):
                yield name
            else:
                waiting.append((f"{name}.{key}" if name else str(key), one))
