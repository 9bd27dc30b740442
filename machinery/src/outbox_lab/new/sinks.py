"""New sinks: the job, and for its kind of result the table, the projection, what is compared, and a test.

A kind is a folder of templates: ``state`` keeps the newest state of each key, ``total`` a sum for each key, ``history``
counts the events of each day, and ``lakehouse`` keeps the events themselves, in a Delta table.
"""

from __future__ import annotations

import keyword
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.events.catalog import Aggregate, Wanted
from outbox.sink import discovery
from outbox_lab.new import properties
from outbox_lab.new.change import Change, following, next_steps, quoted, render, view_columns
from outbox_lab.new.properties import unusable
from outbox_lab.new.schemas import OCCURRED_AT, key_type, merged, status_columns

SINKS_LINE = re.compile(r"^(sinks = \[)(.*)(\].*)$", re.MULTILINE)


class Wish(NamedTuple):
    """The options of a new sink, as a person gave them."""

    name: str
    events: Sequence[str]
    table: str | None = None
    total: str | None = None
    is_history: bool = False
    is_transformed: bool = False
    is_lakehouse: bool = False
    status: str | None = None


class Example(NamedTuple):
    """An event for a test."""

    event: str
    aggregate: str
    type: str
    version: int
    key: str
    payload: Mapping[str, Any]


def sink(settings: Settings, wish: Wish) -> Change:
    """A new sink. Without another wish it keeps the state of each key where it can, and else a history.

    Raises Failure for a name that something else has, or cannot have, and for events that do not suit the result.
    """
    module = wish.name.replace("-", "_")
    _require_name(settings, wish.name, module)
    known = catalog.of_project(settings)
    wanted = known.wanted(wish.events)
    aggregates = [known.aggregates[name] for name in dict.fromkeys(one.schema.aggregate for one in wanted)]
    is_whole = all(name in known.aggregates for name in wish.events)
    of = aggregates[0] if len(aggregates) == 1 else None
    kind = _kind(wish, is_stateful=is_whole and of is not None and of.version is not None)
    values = {**wish._asdict(), "sink": wish.name, "module": module, "kind": kind, "table": wish.table or module}
    values |= {"package": project.current().sinks_package, "aggregates": aggregates, "has_types": len(wanted) > 1}
    values |= {"examples": _examples(aggregates, wanted), "has_contract": _has_contract(), "key": None}
    values["is_personal"] = any(schema.is_personal for one in wanted for schema, _ in one.accepts.values())
    if of is not None:
        values |= {"key": quoted(of.key), "numbered": of.version and quoted(of.version)}
        values |= {"key_type": key_type(of), "source": of.source}
    values |= _columns(wish, kind, aggregates, wanted, is_whole=is_whole)
    if kind != "lakehouse":
        properties.require_word("table", values["table"])
        values["migration"] = following("sink", values["table"])
        values["number"] = values["migration"].number
    new = {**render("sink", values), **render(kind, values)}
    new |= render("transform", values) if wish.is_transformed else {}
    new |= {file: text for file, text in render("missing", values).items() if not file.exists()}
    edited = _run_by_default(wish.name)
    is_run = bool(edited) or wish.name in project.current().sinks
    return Change(new, edited, next_steps("sink", {**values, "is_run": is_run}))


def _columns(
    wish: Wish, kind: str, aggregates: Sequence[Aggregate], wanted: Sequence[Wanted], *, is_whole: bool
) -> dict[str, Any]:
    """The columns of the events, those that the source has too, and whether it has what the sink keeps."""
    ordering = {"version", *(name for one in aggregates for name in (one.key, one.version))}
    columns = merged((one.schema for one in wanted), () if kind == "lakehouse" else ordering)
    in_view = view_columns(aggregates[0].source)
    types = {column.name: column.type for one in wanted for column in one.schema.columns}
    status = wish.status or ("status" if wish.status is None and "status" in (in_view or {"status"}) else "")
    status = status if kind == "state" and len(wanted) > 1 and status not in types else ""
    if wish.status and not status:
        raise _unsuitable(wish, f"they give no state of several, or have {wish.status} already", "omit --status")
    columns += status_columns(status)
    moments = [one.name for one in columns if one.type == "timestamptz" and not one.is_nullable]
    if not moments and (kind == "history" or wish.is_transformed):
        raise _unsuitable(wish, "an event has no time", "give each event a required property of type timestamp")
    added = {(wish.total, "bigint"), (wish.total, "numeric")}
    adding = [one.name for one in wanted for column in one.schema.columns if (column.name, column.type) in added]
    if kind == "total" and (len(aggregates) > 1 or not adding):
        of_one = f"{wish.total} is {types[wish.total]}, not a number" if wish.total in types else ""
        problem = f"they are not of one aggregate type with a number {wish.total}"
        raise _unsuitable(wish, problem if len(aggregates) > 1 else of_one or problem, "see `outbox events`")
    is_known = is_whole and all(one.version and one.source for one in aggregates)
    return {
        "columns": columns,
        "status": status,
        "compared": [one for one in columns if one.name in in_view],
        "moment": OCCURRED_AT if OCCURRED_AT in moments else next(iter(moments), None),
        "adding": adding if len(adding) < len(wanted) else [],
        "is_comparable": is_known and (kind != "total" or wish.total in in_view),
    }


def _kind(wish: Wish, *, is_stateful: bool) -> str:
    if wish.is_lakehouse or wish.total is not None:
        return "lakehouse" if wish.is_lakehouse else "total"
    return "state" if is_stateful and not wish.is_history and not wish.is_transformed else "history"


def _examples(aggregates: Sequence[Aggregate], wanted: Sequence[Wanted]) -> list[Example]:
    """One event of each kind, as if one key of each aggregate type had them in turn."""
    by_name = {one.name: one for one in aggregates}
    numbers, keys, found = Counter[str](), dict[str, Any](), list[Example]()
    for name, schema in ((one.name, one.schema) for one in wanted if one.schema.examples):
        of, payload = by_name[schema.aggregate], dict(schema.examples[0])
        numbers[of.name] += 1
        payload[of.key] = keys.setdefault(of.name, payload[of.key])
        payload |= {of.version: numbers[of.name]} if of.version else {}
        found.append(Example(name, of.name, schema.type, schema.version, str(payload[of.key]), payload))
    return found


def _require_name(settings: Settings, name: str, module: str) -> None:
    """Raises Failure for a name that no sink can have, or that one has."""
    if not discovery.NAME.fullmatch(name) or keyword.iskeyword(module):
        raise unusable(f"sink {name!r}", "it is not a valid name", "use a-z, 0-9, _ and -; no keyword of Python")
    try:
        names = [job.name for job in discovery.jobs(settings)]
    except Exception as error:  # the project's own code; or it has no sinks yet
        if not isinstance(error, Failure) or error.code != "sinks-package-missing":
            problem = f"the sinks cannot be loaded: {error}"
            raise Failure(problem, "correct them first", code="sinks-unusable") from error
        names = []
    if name in names:
        raise unusable(f"sink {name}", "there is a sink of this name", "choose another name")


def _has_contract() -> bool:
    """Whether the project has the contract test."""
    tests = (project.current().root / "tests").rglob("test_*.py")
    return any("outbox_lab.testing.contract" in file.read_text("utf-8") for file in tests)


def _run_by_default(name: str) -> dict[Any, str]:
    """The file pyproject.toml with the sink in its list of sinks; nothing if the list cannot be edited."""
    file = project.current().root / project.FILE
    added = SINKS_LINE.sub(rf'\1\2, "{name}"\3', file.read_text("utf-8"), count=1).replace("[, ", "[")
    is_added = tomllib.loads(added)["tool"]["outbox"].get("sinks") == [*project.current().sinks, name]
    return {file: added} if is_added else {}


def _unsuitable(wish: Wish, problem: str, remedy: str) -> Failure:
    return Failure(f"events {', '.join(wish.events)}: {problem}", remedy, code="events-unsuitable")
