"""What `outbox events check` finds in the declarations themselves: examples, upcasters, and the sinks that take them.

An upcaster must be pure: a sink may read an event again after years, and must get the same payload. A sink may be
unable to start though each declaration is valid: an upcaster is missing, two events would have one view, or a
projection cannot be used. Nothing here needs a database.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any, NamedTuple

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events import upcasting
from outbox.events.catalog import Aggregate, Catalog
from outbox.events.schema import EventSchema, Violation
from outbox.events.upcasting import Function
from outbox.events.values import as_json, decode, misfit
from outbox_lab.events import Finding

LIKE_AN_UPCASTER = re.compile(r"[A-Za-z]\w*_v[0-9]+")


class Step(NamedTuple):
    """An upcaster between two versions of an event that follow each other."""

    name: str
    function: Function
    old: EventSchema
    new: EventSchema


def examples(catalog: Catalog) -> list[Finding]:
    """Every example that is not valid, and every upcaster that fails, is not pure, or has no example.

    Raises Failure if a file of upcasters cannot be run.
    """
    found = [finding for schema in catalog.schemas for finding in _examples(schema)]
    for aggregate in catalog.aggregates.values():
        known = upcasting.functions_in(catalog.folder / aggregate.name / upcasting.FILE)
        steps = {step.old.name: step for versions in aggregate.events.values() for step in _steps(versions, known)}
        found += _untested(aggregate, steps.values(), known)
        found += [finding for first in steps.values() for finding in _upcast(aggregate, first, steps)]
    return list(dict.fromkeys(found))


def _examples(schema: EventSchema) -> Iterator[Finding]:
    for number, example in enumerate(schema.examples, start=1):
        problem = _problem(schema, _decoded(example))
        if problem is not None:
            yield Finding("example-invalid", schema.file, problem[0], f"example {number}: {problem[1]}")


def _problem(schema: EventSchema, payload: Any) -> Violation | None:
    """Why a payload is no event of a version; None if it is one."""
    return schema.violation(payload) or misfit(schema, payload)


def _steps(versions: Mapping[int, EventSchema], known: Mapping[str, Function]) -> Iterator[Step]:
    for old, new in pairwise(versions.values()):
        name = upcasting.name_of(old.type, old.version)
        if name in known:
            yield Step(name, known[name], old, new)


def _untested(aggregate: Aggregate, steps: Collection[Step], known: Mapping[str, Function]) -> Iterator[Finding]:
    for step in steps:
        if not step.old.examples:
            yield Finding("example-missing", step.old.file, "", f"no example of this version tests {step.name}")
    for name in known.keys() - {step.name for step in steps}:
        if LIKE_AN_UPCASTER.fullmatch(name):
            message = f"{name} is never called: no version of that name is followed by another"
            yield Finding("upcaster-unused", f"{aggregate.name}/{upcasting.FILE}", "", message)


def _upcast(aggregate: Aggregate, first: Step, steps: Mapping[str, Step]) -> Iterator[Finding]:
    """Bring each valid example of a version as far as there are upcasters, or to the first fault."""
    for number, example in enumerate(first.old.examples, start=1):
        payload, step = _decoded(example), steps.get(first.old.name)
        if _problem(first.old, payload) is not None:
            continue
        while step is not None:
            payload, fault = _stepped(aggregate, step, payload)
            if fault is not None:
                rule, property_, message = fault
                shown = f"{step.name}: {message} (example {number} of {first.old.name})"
                yield Finding(rule, f"{aggregate.name}/{upcasting.FILE}", property_, shown)
                break
            step = steps.get(step.new.name)


def _stepped(aggregate: Aggregate, step: Step, payload: dict[str, Any]) -> tuple[Any, tuple[str, str, str] | None]:
    """The payload that an upcaster returns for this one; and its fault, as rule, property and message."""
    arguments = deepcopy(payload), deepcopy(payload)
    try:
        made, again = (as_json(step.function(argument)) for argument in arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # as `Upcaster.upcast`
        return None, ("upcaster-failed", "", f"{type(error).__name__}: {error}")
    if arguments != (payload, payload):
        return made, ("upcaster-impure", "", "it changes its argument")
    if made != again:
        return made, ("upcaster-impure", "", "it returns two results for one payload")
    if (problem := _problem(step.new, made)) is not None:
        return made, ("upcaster-failed", problem[0], f"it returns no {step.new.name}: {problem[1]}")
    for name in filter(None, (aggregate.key, aggregate.version)):
        if made[name] != payload[name]:
            return made, ("upcaster-failed", name, "it changes the property that orders the events")
    return made, None


def _decoded(example: Any) -> Any:
    """An example as a reader of its JSON has it."""
    return decode(json.dumps(example).encode())


class Consumers(NamedTuple):
    """The names of the sinks that take each version of an event, and why others are not known."""

    by_version: Mapping[str, Sequence[str]]
    notes: Sequence[str]


def consumers(settings: Settings, known: Catalog) -> Consumers:
    """The sinks of the project; none, and a note, where they cannot be loaded."""
    try:
        from outbox.sink import discovery

        jobs = discovery.jobs(settings)
    except Exception as error:  # the project's own code, or a library that is not installed beside the service
        return Consumers({}, [f"the sinks cannot be loaded: {_line(error)}"])
    by_version: dict[str, list[str]] = {}
    notes = []
    for job in jobs:
        try:
            wanted = known.wanted(job.events)
        except Failure as failure:
            notes.append(f"sink {job.name}: {failure}")
            continue
        for schema in [schema for one in wanted for schema, _ in one.accepts.values()]:
            by_version.setdefault(schema.name, []).append(job.name)
    return Consumers(by_version, notes)


def sinks(settings: Settings) -> tuple[list[Finding], str]:
    """Every sink that cannot start, or whose personal data cannot be erased; or why no sink is examined."""
    try:
        from outbox.sink import discovery
    except ImportError as error:  # beside a service, the libraries of sinks may not be installed
        return [], f"the sinks are not checked: {_line(error)}"
    try:
        usable, failures = discovery.usable(settings)
    except Failure as failure:
        if failure.code == "sinks-package-missing":
            return [], f"no sinks are checked: {_line(failure)}"
        return [Finding(failure.code, "sinks", "", _line(failure))], ""
    except Exception as error:  # the project's own code
        return [Finding("sinks-unusable", "sinks", "", f"the sinks cannot be loaded: {_line(error)}")], ""
    found = [_unusable(name, failure) for name, failure in failures.items()]
    for spec in usable:
        for topic in () if spec.target.is_elsewhere else spec.decoders:
            try:
                spec.erase_files(topic)
            except Failure as failure:
                found.append(_unusable(spec.name, failure))
    return found, ""


def _unusable(name: str, failure: Failure) -> Finding:
    return Finding(failure.code, f"sink {name}", "", str(failure).removeprefix(f"sink {name}: "))


def _line(error: Exception) -> str:
    text = str(error) if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
