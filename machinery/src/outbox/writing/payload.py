"""A payload as JSON text, exactly as the outbox gets it. It may be a mapping or a typed object, with nested ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

# What msgspec, a model of pydantic, and a payload that contains itself raise.
NOT_ENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)
# Subclasses of these are written as what they are; msgspec itself takes only the types.
PLAIN: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}


def encode(payload: object) -> bytes:
    """The payload as JSON. A Decimal is a number with all its digits, a UUID and a datetime are texts.

    Raises one of NOT_ENCODABLE for what JSON cannot express. NaN and infinity are such values: msgspec would write
    null for them.
    """
    encoded = _encode(payload)
    if b"null" in encoded and not _is_finite(msgspec.to_builtins(payload, enc_hook=_as_builtin)):
        raise ValueError("NaN and infinity are no numbers in JSON")
    return encoded


def _as_builtin(value: Any) -> Any:
    """What msgspec does not know by itself, as something that it does."""
    dump = getattr(value, "model_dump", None)
    if dump is not None:  # a model of pydantic, which need not be installed
        return dump(mode="json")
    if isinstance(value, Mapping):
        return dict(value)
    for type_, as_plain in PLAIN.items():
        if isinstance(value, type_):
            return as_plain(value)
    raise TypeError(f"{type(value).__name__} is no type that JSON has a value for")


_encode = msgspec.json.Encoder(decimal_format="number", enc_hook=_as_builtin).encode


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
