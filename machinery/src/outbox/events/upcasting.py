"""Upcasters: pure functions that bring a payload of an older version to the next declared one.

They are in a file `upcast.py` beside the schemas of an aggregate, each named after the event type and the version that
it takes, and return the payload of the next declared version:

    def opened_v1(payload: dict[str, Any]) -> dict[str, Any]:
        return {**payload, "owner": None}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from outbox.base.errors import Failure
from outbox.events.schema import EventSchema, Rejection, shortened
from outbox.events.values import as_json

FILE = "upcast.py"
UPCAST_FAILED = "upcast failed"

Function = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Upcaster:
    """Brings payloads of one version to that of ``target``, by functions of a file.

    Executors receive it by pickling: the file's text travels, so no executor needs the file.
    """

    file: str
    source: str
    names: Sequence[str]
    target: EventSchema
    is_personal: bool = False
    """Whether an event that it takes has personal data: then no message repeats what a function says."""

    def upcast(self, payload: Any) -> Any | Rejection:
        """The payload of the target's version; or a rejection if a function fails, or returns what is not valid."""
        name = self.names[0]
        try:
            functions = _functions(self.file, self.source)
            for name in self.names:
                payload = functions[name](dict(payload))
            payload = as_json(payload)
            violation = self.target.violation(payload)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a mistake in it sets the event aside, also one that would end the process
            said = "" if self.is_personal else f": {error}"
            return Rejection(UPCAST_FAILED, shortened(f"{name}: {type(error).__name__}{said}"))
        if violation is not None and self.is_personal:
            violation = violation._replace(detail=f"$.{violation.name}")
        return payload if violation is None else Rejection(UPCAST_FAILED, shortened(f"{name}: {violation.detail}"))


def name_of(type_: str, version: int) -> str:
    """The name of the function that takes a version of an event type."""
    return f"{re.sub(r'[^0-9A-Za-z_]', '_', type_)}_v{version}"


def chain(file: Path, versions: Sequence[EventSchema]) -> Upcaster | None:
    """The upcaster from the first of these versions, in order, to the last; None if a function is missing.

    Raises Failure if the file cannot be run.
    """
    names = [name_of(one.type, one.version) for one in versions[:-1]]
    source = _read(file)
    if not names or not _functions(str(file), source).keys() >= {*names}:
        return None
    return Upcaster(str(file), source, names, versions[-1], any(one.is_personal for one in versions))


def functions_in(file: Path) -> dict[str, Function]:
    """The functions of a file, by name; none if there is no file. Raises Failure if it cannot be run."""
    return _functions(str(file), _read(file))


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise _unusable(str(file), error) from None


@cache
def _functions(file: str, source: str) -> dict[str, Function]:
    space: dict[str, Any] = {"__name__": "upcast", "__file__": file}
    try:
        exec(compile(source, file, "exec"), space)  # noqa: S102 - the project's own file
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _unusable(file, error) from None
    return {name: found for name, found in space.items() if callable(found)}


def _unusable(file: str, error: BaseException) -> Failure:
    problem = " ".join(f"{type(error).__name__}: {error}".split())
    return Failure(f"{file}: {problem}", "correct the file", code="event-declaration-unusable")
