"""Requests: a body is one JSON object in UTF-8, of a limited size, and every text is one that a database holds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn

from outbox.http import problems
from outbox.http.problems import FieldError, HttpError

MAX_BYTES = 16 * 1024
METHODS = {"POST", "PUT", "PATCH"}
NO_FIELD_DETAIL = "this route takes no fields"
# Postgres has no text with U+0000; a lone surrogate is no character, and UTF-8 has no bytes for it.
UNSTORABLE = re.compile("[\0\ud800-\udfff]")
UNSTORABLE_DETAIL = "contains U+0000 or a lone surrogate, which no database holds"
BYTE_ORDER_MARK = "\ufeff"
NOT_JSON = "the body is not valid JSON in UTF-8 with unique keys"


def loads(document: str | bytes) -> Any:
    """Decode JSON as RFC 8259 defines it for exchange between systems.

    Python's own decoder also reads UTF-16, UTF-32, a byte order mark, ``NaN`` and repeated keys. Another reader of the
    same body could then see other values. Raises ValueError if the document is invalid, and RecursionError if it is
    nested too deeply.
    """
    text = document if isinstance(document, str) else document.decode()
    if text.startswith(BYTE_ORDER_MARK):
        raise ValueError("the JSON begins with a byte order mark")
    return json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)


@dataclass(frozen=True)
class Sent:
    """A request that a route is about to get."""

    method: str
    content_type: str
    body: bytes
    path: Mapping[str, object]
    """The parameters in the path, decoded."""
    texts: list[tuple[str, str]]
    """The parameters of the query, and the cookies."""
    takes_body: bool
    """Whether the route has a parameter for the body."""

    @property
    def is_json(self) -> bool:
        mimetype = self.content_type.partition(";")[0].strip().lower()
        return mimetype == "application/json" or (mimetype.startswith("application/") and mimetype.endswith("+json"))


def check(sent: Sent) -> None:
    """Require that every body is one JSON object. Raises HttpError 400, 413 or 415 otherwise; a wrong field is 422.

    A route without a body takes a request without one, of any content type, and an empty object; any field is 422.
    A text that Postgres has no text for is no value of any field: 422 in a body, a query or a cookie, 404 in a path.
    """
    takes_body = sent.takes_body and sent.method in METHODS
    fields = _object(sent) if takes_body or sent.body else {}
    for name, value in sent.path.items():
        if isinstance(value, str) and UNSTORABLE.search(value):
            raise _error(HTTPStatus.NOT_FOUND, f"path: {name} {UNSTORABLE_DETAIL}")
    texts: list[tuple[str, object]] = [*sent.texts, ("", fields)]
    unstorable = dict.fromkeys(field for name, value in texts for field in _unstorable(name, value))
    _refuse(unstorable, UNSTORABLE_DETAIL)
    if sent.method in METHODS and not takes_body:
        _refuse(fields, NO_FIELD_DETAIL)


def _object(sent: Sent) -> dict[str, Any]:
    if len(sent.body) > MAX_BYTES:
        raise _error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {MAX_BYTES} bytes")
    if not sent.is_json:
        raise _error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the Content-Type must be application/json")
    try:
        found = loads(sent.body)
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


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("a number is out of range")
    return number


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
