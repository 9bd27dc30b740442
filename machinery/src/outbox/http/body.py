"""Requests: a body is one JSON object in UTF-8, of a limited size, and every text is one that a database holds."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NoReturn

from flask import Flask, Response, current_app, request
from flask.json.provider import DefaultJSONProvider
from werkzeug.exceptions import BadRequest, NotFound, UnsupportedMediaType

from outbox.http import problems
from outbox.http.problems import FieldError

MAX_BYTES = 16 * 1024
METHODS = {"POST", "PUT", "PATCH"}
PARAMETERS = {"body", "form", "raw"}  # of a route that takes a body
NO_FIELD_DETAIL = "this route takes no fields"
# Postgres has no text with U+0000; a lone surrogate is no character, and UTF-8 has no bytes for it.
UNSTORABLE = re.compile("[\0\ud800-\udfff]")
UNSTORABLE_DETAIL = "contains U+0000 or a lone surrogate, which no database holds"
BYTE_ORDER_MARK = "\ufeff"


class StrictJson(DefaultJSONProvider):
    """JSON as RFC 8259 defines it for exchange between systems.

    Python's own decoder also reads UTF-16, UTF-32, a byte order mark, ``NaN`` and repeated keys. Another reader of the
    same body could then see other values.
    """

    def loads(self, s: str | bytes, **options: Any) -> Any:
        """Decode a document. Raises ValueError if it is invalid, and RecursionError if it is nested too deeply."""
        text = s if isinstance(s, str) else s.decode()
        if text.startswith(BYTE_ORDER_MARK):
            raise ValueError("the JSON begins with a byte order mark")
        return json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant, **options)

    def dumps(self, obj: Any, **options: Any) -> str:
        """Encode a response. Raises ValueError for NaN and infinity, which no reader of JSON takes."""
        return super().dumps(obj, allow_nan=False, **options)


def register(app: Flask) -> None:
    """Require that every body is one JSON object: 400, 413 or 415 otherwise. A wrong field is 422, by the route.

    A route without a body takes a request without one, of any content type, and an empty object; any field is 422.
    A text that Postgres has no text for is no value of any field: 422 in a body, a query or a cookie, 404 in a path.
    """
    app.json = StrictJson(app)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BYTES
    app.before_request(_require_object)
    app.before_request(_require_storable)
    app.before_request(_require_no_field)


def _require_object() -> None:
    if request.url_rule is None or not (_needs_body() or request.get_data()):
        return
    try:
        body = request.get_json()
    except (BadRequest, RecursionError):
        raise BadRequest("the body is not valid JSON in UTF-8 with unique keys") from None
    except UnsupportedMediaType:
        raise UnsupportedMediaType("the Content-Type must be application/json") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")


def _needs_body() -> bool:
    return request.method in METHODS and _takes_body(current_app.view_functions[str(request.endpoint)])


@cache
def _takes_body(route: Callable[..., object]) -> bool:
    return bool(PARAMETERS & inspect.signature(route).parameters.keys())


def _require_no_field() -> Response | None:
    is_without = request.url_rule is not None and request.method in METHODS and not _needs_body()
    fields = request.get_json() if is_without and request.get_data() else ()
    errors = [FieldError(field=name, detail=NO_FIELD_DETAIL) for name in fields]
    return problems.invalid_fields(errors) if errors else None


def _require_storable() -> Response | None:
    for name, value in (request.view_args or {}).items():
        if isinstance(value, str) and UNSTORABLE.search(value):
            raise NotFound(f"path: {name} {UNSTORABLE_DETAIL}")
    sent: list[tuple[str, object]] = [*request.args.items(multi=True), *request.cookies.items(multi=True)]
    if request.is_json and request.get_data():
        sent.append(("", request.get_json()))
    fields = dict.fromkeys(field for name, value in sent for field in _unstorable(name, value))
    errors = [FieldError(field=field, detail=UNSTORABLE_DETAIL) for field in fields]
    return problems.invalid_fields(errors) if errors else None


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
