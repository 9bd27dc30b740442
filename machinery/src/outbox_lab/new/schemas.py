"""New aggregate types, events, and versions of events; and the table of the service that an aggregate type is of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from outbox.base import project
from outbox.base.settings import Settings
from outbox.events import catalog, upcasting
from outbox.events.catalog import Aggregate
from outbox.events.schema import Column, EventSchema
from outbox_lab.events.payloads import class_name
from outbox_lab.new import properties
from outbox_lab.new.change import Change, following, next_steps, render, shown
from outbox_lab.new.properties import Property, unusable

DRAFT = "https://json-schema.org/draft/2020-12/schema"
OCCURRED_AT = "occurred_at"


def aggregate(
    settings: Settings,
    name: str,
    given: Sequence[Property],
    types: Sequence[str],
    *,
    key: str | None,
    version: str,
    table: str | None,
    has_table: bool,
    status: str,
) -> Change:
    """A new aggregate type with events of these types; and with ``has_table`` a table of the service, which has a view
    ``source_TABLE``. If there are several types, the table has the newest event's in a column ``status``.

    Raises Failure for a name that something else has, or cannot have.
    """
    if not catalog.NAME.fullmatch(name):
        raise unusable(f"aggregate type {name!r}", "it is not a valid name", "use letters, digits, _ and -")
    if name in catalog.of_project(settings).aggregates:
        raise unusable(f"aggregate type {name}", "it is declared", f"`outbox new event {name}.TYPE` adds an event")
    word = name.replace("-", "_").lower()
    table = (table or f"{word}s") if has_table else None
    ordering = properties.read(key or f"{word}_id", "uuid")
    ordering = ordering._replace(example=ordering.example_of(name, 0))  # all examples are of one key
    numbers = [properties.version(version)] if version else []
    every = [ordering, *given, *numbers, properties.read(f"{OCCURRED_AT}:timestamp")]
    status = status if table and len(types) > 1 and status not in {one.name for one in every} else ""
    values = {"aggregate": name, "key": ordering.name, "numbered": version, "types": types, "table": table}
    values["status"] = status
    change = Change(render("aggregate", values))
    for number, type_ in enumerate(types):
        change.new |= _event(name, type_, every, number)
    made = change.declared(settings).aggregates[name]
    if table is not None:
        properties.require_word("table", table)
        migration = following("source", table, f"source_{table}")
        columns = merged(made.schemas, {made.key, version}) + status_columns(status)
        more = {"migration": migration, "number": migration.number, "columns": columns, "key_type": key_type(made)}
        change.new |= render("table", {**values, **more})
    more = {"topic": made.topic, "class_name": class_name(made.events[types[0]][1])}
    change.next_steps = next_steps("aggregate", {**values, **more})
    return change


def event(settings: Settings, name: str, given: Sequence[Property]) -> Change:
    """A new event of an existing aggregate type, with the key, the version and the time as the others have them."""
    of, type_ = _found(settings, name)
    if type_ in of.events:
        raise unusable(f"event {name}", "it is declared", f"`outbox new version {name}` makes its next version")
    newest = max(of.schemas, key=lambda schema: schema.version)
    like = _document(newest)
    made_of = dict.fromkeys(like["properties"]) | next(iter(newest.examples), {})
    made_of |= {one.name: properties.TYPES["timestamp"][1] for one in newest.columns if one.type == "timestamptz"}
    shared = [str(one) for one in (of.key, of.version, OCCURRED_AT) if one in like["properties"]]
    key, *others = [Property(one, like["properties"][one], made_of[one]) for one in shared]
    change = Change(_event(of.name, type_, [key, *given, *others], len(of.events)))
    made = change.declared(settings).schema(of.name, type_, 1)
    values = {"aggregate": of.name, "given": given, "class_name": class_name(made)}
    change.next_steps = next_steps("event", values)
    return change


def version(settings: Settings, name: str, given: Sequence[Property], removed: Sequence[str]) -> Change:
    """The next version of an event, and the upcaster from the present one."""
    of, type_ = _found(settings, name)
    if type_ not in of.events:
        there_are = ", ".join(f"{of.name}.{one}" for one in of.events)
        raise unusable(f"event {name}", "it is not declared", f"there are {there_are}")
    newest = of.events[type_][max(of.events[type_])]
    document, function = _document(newest), upcasting.name_of(type_, newest.version)
    fixed = {of.key, of.version, *(one.name for one in given)} & {*removed}
    if unknown := sorted(fixed | ({*removed} - document["properties"].keys())):
        raise unusable(f"property {unknown[0]}", "it cannot be removed", "name a property that no order depends on")
    change = Change(_schema(of.name, type_, newest.version + 1, _next(document, newest.version + 1, given, removed)))
    file = catalog.of_project(settings).folder / of.name / upcasting.FILE
    values = {"aggregate": of.name, "type": type_, "version": newest.version, "function": function, "removed": removed}
    values |= {"given": [one for one in given if one.is_required], "is_new": not file.exists()}
    text = render("version", values)[file]
    if not file.exists():
        change.new[file] = text
    elif function in upcasting.functions_in(file) or not re.search(r"\bAny\b", before := file.read_text("utf-8")):
        raise unusable(f"upcaster {function}", f"{shown(file)} has it, or does not import Any", "correct that file")
    else:
        change.edited[file] = f"{before.rstrip()}\n\n\n{text.lstrip()}"
    made = change.declared(settings).schema(of.name, type_, newest.version + 1)
    change.next_steps = next_steps("version", {**values, "class_name": class_name(made)})
    return change


def merged(schemas: Iterable[EventSchema], but: Iterable[str | None] = ()) -> list[Column]:
    """The columns of several events. One that an event lacks is nullable; of several types are left out."""
    all_of = [{column.name: column for column in schema.columns} for schema in schemas]
    found = []
    for name in dict.fromkeys(name for columns in all_of for name in columns if name not in {*but, *properties.OURS}):
        own = [columns[name] for columns in all_of if name in columns]
        if len({column.type for column in own}) == 1:
            is_nullable = len(own) < len(all_of) or any(column.is_nullable for column in own)
            found.append(own[0]._replace(is_nullable=is_nullable))
    return found


def status_columns(name: str) -> list[Column]:
    """The column for the type of the newest event; none if it has no name. Raises Failure if no table can have it."""
    return [Column(properties.read(f"{name}:text").name, "text", is_nullable=False)] if name else []


def key_type(of: Aggregate) -> str:
    """The type of the key's column."""
    return next(column.type for column in of.schemas[0].columns if column.name == of.key)


def _event(of: str, type_: str, every: Sequence[Property], number: int) -> dict[Path, str]:
    """The schema of version 1, with an example. ``number``: how many events of the aggregate type come before."""
    if not catalog.TYPE.fullmatch(type_):
        remedy = "begin with a letter; then letters, digits and the characters _ . - may follow"
        raise unusable(f"event type {type_!r}", "it is not a valid name", remedy)
    names = [one.name for one in every]
    if twice := [name for name in names if names.count(name) > 1]:
        raise unusable(f"property {twice[0]}", "it is given twice, or each event has it", "name it once")
    document = {
        "$schema": DRAFT,
        "title": f"{of} {type_}, version 1",
        "type": "object",
        "required": [one.name for one in every if one.is_required],
        "properties": {one.name: one.rule for one in every},
        "examples": [{one.name: one.example_of(type_, number) for one in every}],
    }
    return _schema(of, type_, 1, document)


def _schema(of: str, type_: str, number: int, document: dict[str, Any]) -> dict[Path, str]:
    values = {"aggregate": of, "type": type_, "version": number, "document": document}
    return render("schema", values)


def _found(settings: Settings, name: str) -> tuple[Aggregate, str]:
    """The aggregate type and the type of an event's name."""
    of, _, type_ = name.partition(".")
    known = catalog.of_project(settings)
    if of not in known.aggregates or not type_:
        there_are = ", ".join(f"{one}.TYPE" for one in known.aggregates) or "none: begin with `outbox new aggregate`"
        raise unusable(f"event {name!r}", "no aggregate type has it", f"there are {there_are}")
    return known.aggregates[of], type_


def _document(schema: EventSchema) -> dict[str, Any]:
    """A schema as its file has it: references stay references."""
    found: dict[str, Any] = json.loads((project.current().events / schema.file).read_text("utf-8"))
    return found


def _next(document: dict[str, Any], number: int, given: Sequence[Property], removed: Sequence[str]) -> dict[str, Any]:
    """A schema as its next version has it."""

    def kept(values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name not in removed}

    before = kept(document["properties"])
    if known := [one.name for one in given if one.name in before]:
        raise unusable(f"property {known[0]}", "the event has it", "choose another name, or --remove it first")
    found = {name: content for name, content in document.items() if name != "deprecated"}
    found["title"] = re.sub(r"version \d+", f"version {number}", document.get("title", f"version {number}"))
    found["required"] = [one for one in document.get("required", ()) if one not in removed]
    found["required"] += [one.name for one in given if one.is_required]
    found["properties"] = before | {one.name: one.rule for one in given}
    examples = {one.name: one.example_of(found["title"], number) for one in given}
    found["examples"] = [{**kept(example), **examples} for example in document.get("examples", ())]
    return found
