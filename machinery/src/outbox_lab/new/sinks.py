"""New sinks: the job, and for its kind of result the table, the projection, what is compared, and a test.

A kind is a folder of templates: ``state`` keeps the newest state of each key, ``total`` a sum for each key, ``history``
counts the events of each day, and ``lakehouse`` keeps the events themselves, in a Delta table.
"""

from __future__ import annotations

import keyword
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, NamedTuple

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.events.catalog import Aggregate, Wanted
from outbox.events.schema import Column, EventSchema
from outbox.sink import discovery
from outbox_lab.new import history, properties, templates
from outbox_lab.new.change import Change
from outbox_lab.new.properties import quoted, unusable
from outbox_lab.new.schemas import OCCURRED_AT, merged

NUMBERS = {"bigint", "numeric"}
AS_THEY_ARE = {"bigint", "text", "boolean", "uuid"}  # values that a test compares
SPARK = {"bigint": "BIGINT", "boolean": "BOOLEAN", "timestamptz": "TIMESTAMP"}  # any other is STRING
SINKS_LINE = re.compile(r"^(sinks = \[)(.*)(\].*)$", re.MULTILINE)


class Wish(NamedTuple):
    """What a person wants of a sink."""

    name: str
    events: Sequence[str]
    table: str | None = None
    total: str | None = None
    is_history: bool = False
    is_transformed: bool = False
    is_lakehouse: bool = False


class Example(NamedTuple):
    """An event for a test."""

    event: str
    aggregate: str
    type: str
    version: int
    key: str
    payload: dict[str, Any]


@dataclass(frozen=True)
class Taken:
    """The events that a sink takes. ``is_whole``: these are all events of their aggregate types."""

    wanted: Sequence[Wanted]
    aggregates: Sequence[Aggregate]
    is_whole: bool

    @property
    def single(self) -> Aggregate | None:
        """The aggregate type that all events are of; None if there are several."""
        return self.aggregates[0] if len(self.aggregates) == 1 else None

    @property
    def is_comparable(self) -> bool:
        """Whether the views of the source say how many events each key has had."""
        return self.is_whole and all(one.version and one.source for one in self.aggregates)

    @cached_property
    def columns(self) -> list[Column]:
        """The columns of the events, without key and version."""
        ordering = {"version", *(name for one in self.aggregates for name in (one.key, one.version) if name)}
        return merged((one.schema for one in self.wanted), ordering)

    @property
    def moment(self) -> str | None:
        """The column that says when each event happened."""
        names = [one.name for one in self.columns if one.type == "timestamptz" and not one.is_nullable]
        return OCCURRED_AT if OCCURRED_AT in names else next(iter(names), None)

    @cached_property
    def examples(self) -> list[Example]:
        """One event of each kind, as if one key of each aggregate type had them in turn."""
        by_name = {one.name: one for one in self.aggregates}
        numbers, keys, found = Counter[str](), dict[str, Any](), list[Example]()
        for one in self.wanted:
            schema, of = one.schema, by_name[one.schema.aggregate]
            if schema.examples and not schema.is_deprecated:
                numbers[of.name] += 1
                payload = _distinct(schema, numbers[of.name])
                payload[of.key] = keys.setdefault(of.name, payload[of.key])
                if of.version:
                    payload[of.version] = numbers[of.name]
                found.append(Example(one.name, of.name, schema.type, schema.version, str(payload[of.key]), payload))
        return found

    def type(self, name: str) -> str:
        """The type of a column of the first event."""
        return next(column.type for column in self.wanted[0].schema.columns if column.name == name)


def sink(settings: Settings, wish: Wish) -> Change:
    """A new sink. Without another wish it keeps the state of each key where it can, and else a history.

    Raises Failure for a name that something else has, or cannot have, and for events that do not suit the result.
    """
    module = wish.name.replace("-", "_")
    _require_name(settings, wish.name, module)
    taken = _taken(settings, wish.events)
    kind = _kind(wish, taken)
    if (kind == "history" or wish.is_transformed) and taken.moment is None:
        raise _unsuitable(wish, "an event has no time", "give each event a required property of type timestamp")
    table = wish.table or module
    values = {**wish._asdict(), "sink": wish.name, "module": module, "kind": kind, "table": table}
    values |= {"aggregates": taken.aggregates, "has_types": len(taken.wanted) > 1, "moment": taken.moment}
    values |= {"is_comparable": taken.is_comparable, "examples": taken.examples}
    values["package"] = project.current().sinks_package
    values |= {"state": _state, "total": _total, "history": _history, "lakehouse": _lakehouse}[kind](wish, taken, table)
    if kind != "lakehouse":
        properties.require_word(f"table {table!r}", table)
        history.require_free("sink", table)
        values |= {"migration": history.following("sink"), "number": history.following("sink").number}
    change = Change()
    for folder in ("sink", kind, "transform"):
        change.new |= templates.render(folder, values)
    change.add_missing(templates.render("missing", {**values, "has_contract": _has_contract()}))
    is_run = _run_by_default(change, wish.name)
    change.next_steps = templates.next_steps("sink", {**values, "is_run": is_run})
    return change


def _distinct(schema: EventSchema, number: int) -> dict[str, Any]:
    """An example whose numbers and texts differ from those of other events, where the schema allows that."""
    payload = dict(schema.examples[0])
    for column in schema.columns:
        value = payload.get(column.name)
        other = {"bigint": number, "text": schema.type}.get(column.type)
        if value is not None and other is not None and schema.violation({**payload, column.name: other}) is None:
            payload[column.name] = other
    return payload


def _state(_: Wish, taken: Taken, table: str) -> dict[str, Any]:
    of = taken.aggregates[0]
    key_type, in_view = taken.type(of.key), history.view_columns(of.source)
    shown = [one for one in taken.columns if one.type in AS_THEY_ARE]
    last = dict[str, Any]()
    for example in taken.examples:
        last |= {name: value for name, value in example.payload.items() if value is not None}
    names = [of.key, *(one.name for one in shown), str(of.version)]
    selected = [_selected(of.key, key_type), *(_selected(one.name, one.type) for one in shown), "version"]
    return {
        **_ordering(of, key_type),
        "columns": taken.columns,
        "stored": [quoted(of.key), *(quoted(one.name) for one in taken.columns), "version"],
        "compared": [one for one in taken.columns if one.name in in_view],
        **_expected(f"SELECT {', '.join(selected)} FROM {table}", [tuple(map(last.get, names))]),  # noqa: S608
    }


def _total(wish: Wish, taken: Taken, table: str) -> dict[str, Any]:
    of, total = taken.single, str(wish.total)
    by_event = [{one.name for one in wanted.schema.columns if one.type in NUMBERS} for wanted in taken.wanted]
    adding = [one.name for one, numbers in zip(taken.wanted, by_event, strict=True) if total in numbers]
    if of is None:
        raise _unsuitable(wish, "a total is of one aggregate type", "leave out --total, or make a sink for each")
    if not adding:
        numbers = sorted(set().union(*by_event) - {of.key, of.version})
        raise _unsuitable(wish, f"no event has a number {total}", f"there are {', '.join(numbers) or 'none'}")
    key = _selected(of.key, taken.type(of.key))
    held = sum(Decimal(str(example.payload.get(total) or 0)) for example in taken.examples)
    return {
        **_ordering(of, taken.type(of.key)),
        "adding": adding if len(adding) < len(taken.wanted) else [],
        "is_comparable": taken.is_comparable and total in history.view_columns(of.source),
        **_expected(f"SELECT {key}, {quoted(total)}::float8 FROM {table}", [(taken.examples[0].key, float(held))]),  # noqa: S608
    }


def _history(_: Wish, taken: Taken, table: str) -> dict[str, Any]:
    counted = sorted(Counter(example.event for example in taken.examples).items())
    if len(taken.wanted) == 1:
        return _expected(f"SELECT sum(events)::int FROM {table}", [(count,) for _, count in counted])  # noqa: S608
    by_type = 'GROUP BY event_type ORDER BY event_type COLLATE "C"'
    return _expected(f"SELECT event_type, sum(events)::int FROM {table} {by_type}", counted)  # noqa: S608


def _lakehouse(wish: Wish, taken: Taken, _: str) -> dict[str, Any]:
    of = taken.single
    columns = merged(one.schema for one in taken.wanted)
    found = [(one.name, SPARK.get(one.type, "STRING"), one.is_nullable) for one in columns]
    return {
        "columns": [*found, *([("day", "DATE", False)] if wish.is_transformed else [])],
        **{"key": of and of.key, "numbered": of and of.version, "source": of and of.source},
    }


def _ordering(of: Aggregate, key_type: str) -> dict[str, Any]:
    """The key and version of events, as SQL writes them, and the view of the source that has both."""
    numbered = None if of.version is None else quoted(of.version)
    return {"key": quoted(of.key), "key_type": key_type, "numbered": numbered, "source": of.source}


def _expected(query: str, rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """A query of a test, and the rows that it returns."""
    return {"query": query, "rows": list(rows)}


def _selected(name: str, type_: str) -> str:
    """A column as a test selects it: what the example has."""
    return f"{quoted(name)}::text" if type_ == "uuid" else str(quoted(name))


def _kind(wish: Wish, taken: Taken) -> str:
    if wish.is_lakehouse:
        return "lakehouse"
    if wish.total is not None:
        return "total"
    keeps_state = taken.is_whole and taken.single is not None and taken.single.version is not None
    return "state" if keeps_state and not wish.is_history and not wish.is_transformed else "history"


def _taken(settings: Settings, events: Sequence[str]) -> Taken:
    known = catalog.of_project(settings)
    wanted = known.wanted(events)
    names = dict.fromkeys(one.schema.aggregate for one in wanted)
    is_whole = all(name in known.aggregates for name in events)
    return Taken(wanted, [known.aggregates[name] for name in names], is_whole)


def _require_name(settings: Settings, name: str, module: str) -> None:
    """Raises Failure for a name that no sink can have, or that one has."""
    if not discovery.NAME.fullmatch(name) or keyword.iskeyword(module):
        raise unusable(f"sink {name!r}", "it is no name", "use a-z, 0-9, _ and -; no keyword of Python")
    try:
        names = [job.name for job in discovery.jobs(settings)]
    except Failure as failure:
        if failure.code != "sinks-package-missing":
            raise
        names = []
    except Exception as error:  # the project's own code
        raise Failure(f"the sinks cannot be loaded: {error}", "correct them first", code="sinks-unusable") from error
    if name in names:
        raise unusable(f"sink {name}", "there is a sink of this name", "choose another name")


def _has_contract() -> bool:
    """Whether the project has the contract test."""
    tests = project.current().root / "tests"
    return any("outbox_lab.testing.contract" in file.read_text("utf-8") for file in tests.rglob("test_*.py"))


def _run_by_default(change: Change, name: str) -> bool:
    """Let `outbox sink` run it, if the list in pyproject.toml can be edited. Returns whether it does then."""
    file = project.current().root / project.FILE
    before = file.read_text("utf-8")
    after = SINKS_LINE.sub(
        lambda line: f'{line[1]}{line[2]}{", " if line[2].strip() else ""}"{name}"{line[3]}', before, 1
    )
    if tomllib.loads(after)["tool"]["outbox"].get("sinks") != [*project.current().sinks, name]:
        return name in project.current().sinks
    change.edited[file] = after
    return True


def _unsuitable(wish: Wish, problem: str, remedy: str) -> Failure:
    return Failure(f"sink {wish.name} of {', '.join(wish.events)}: {problem}", remedy, code="events-unsuitable")
