"""Request bodies: one JSON object in UTF-8, of a limited size."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from flask import Flask, request
from flask.json.provider import DefaultJSONProvider
from werkzeug.exceptions import BadRequest, UnsupportedMediaType

MAX_BYTES = 16 * 1024
METHODS = {"POST", "PUT", "PATCH"}
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
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, **options)


def register(app: Flask) -> None:
    """Require that every body is one JSON object: 400, 413 or 415 otherwise. A wrong field is 422, by the route."""
    app.json = StrictJson(app)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BYTES
    app.before_request(_require_object)


def _require_object() -> None:
    if request.method not in METHODS or request.url_rule is None:
        return
    try:
        body = request.get_json()
    except (BadRequest, RecursionError):
        raise BadRequest("the body is not valid JSON in UTF-8 with unique keys") from None
    except UnsupportedMediaType:
        raise UnsupportedMediaType("the Content-Type must be application/json") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is not a JSON object")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
