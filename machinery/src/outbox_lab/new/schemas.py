"""New aggregate types, events, and versions of events; and the table of the service that an aggregate type is of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from outbox.base.settings import Settings
from outbox.events import catalog, upcasting
from outbox.events.catalog import Aggregate, Catalog
from outbox.events.schema import Column, EventSchema
from outbox_lab.new import history, properties, templates
from outbox_lab.new.change import Change, declared, shown
from outbox_lab.new.properties import NUMBER_OF_KEY, Property, unusable

DRAFT = "https://json-schema.org/draft/2020-12/schema"
OCCURRED_AT = "occurred_at"


def aggregate(
    settings: Settings,
    name: str,
    given: Sequence[Property],
    types: Sequence[str],
    *,
    key: str | None = None,
    version: str | None,
    table: str | None = None,
    has_table: bool = True,
) -> Change:
    """A new aggregate type with events of these types; and with ``has_table`` a table of the service, which has a view
    ``source_TABLE``.

    Raises Failure for a name that something else has, or cannot have.
    """
    if not catalog.NAME.fullmatch(name):
        raise unusable(f"aggregate type {name!r}", "it is no name", "use letters, digits, _ and -")
    known = catalog.of_project(settings)
    if name in known.aggregates:
        raise unusable(f"aggregate type {name}", f"{shown(known.folder / name)} declares it", "choose another name")
    word = name.replace("-", "_").lower()
    table = (table or f"{word}s") if has_table else None
    ordering = properties.read(key or f"{word}_id", "uuid")
    every = [ordering, *given, *_numbered(version), properties.read(f"{OCCURRED_AT}:timestamp")]
    properties.require_distinct(every)
    values: dict[str, Any] = {
        "aggregate": name,
        "key": ordering.name,
        "numbered": version,
        "source": table and f"source_{table}",
    }
    change = Change(templates.render("aggregate", values))
    for type_ in types:
        change.new |= _event(name, type_, every)
    made = declared(settings, change).aggregates[name]
    if table is not None:
        change.new |= _table(made, table)
    values |= {"types": types, "table": table, "topic": made.topic}
    change.next_steps = templates.next_steps("aggregate", values)
    return change


def event(settings: Settings, name: str, given: Sequence[Property]) -> Change:
    """A new event of an existing aggregate type, with the key, the version and the time as the others have them."""
    of, type_ = _split(name)
    known = catalog.of_project(settings)
    found = _aggregate(known, of)
    if type_ in found.events:
        remedy = f"`outbox new version {name}` makes another version of it"
        raise unusable(f"event {name}", f"{found.events[type_][min(found.events[type_])].file} declares it", remedy)
    shared = [found.key, *filter(None, [found.version]), OCCURRED_AT]
    like = _document(known, max(found.schemas, key=lambda schema: schema.version))
    kept = [_property_of(like, one) for one in shared if one in like["properties"]]
    every = [kept[0], *given, *kept[1:]]
    properties.require_distinct(every)
    change = Change(_event(of, type_, every))
    declared(settings, change)
    change.next_steps = templates.next_steps("event", {"aggregate": of, "type": type_, "given": given})
    return change


def version(settings: Settings, name: str, given: Sequence[Property], removed: Sequence[str]) -> Change:
    """The next version of an event, and the upcaster from the present one."""
    of, type_ = _split(name)
    known = catalog.of_project(settings)
    versions = _aggregate(known, of).events.get(type_)
    if versions is None:
        raise _unknown(f"event {name}", [f"{of}.{one}" for one in known.aggregates[of].events])
    newest = versions[max(versions)]
    document = _document(known, newest)
    _require_removable(known.aggregates[of], document, removed)
    next_document = _changed(document, newest.version + 1, given, removed)
    change = Change(_schema(of, type_, newest.version + 1, next_document))
    upcaster = known.folder / of / upcasting.FILE
    function = upcasting.name_of(type_, newest.version)
    values = {"aggregate": of, "type": type_, "version": newest.version, "function": function, "removed": removed}
    values |= {"given": [one for one in given if one.is_required], "is_new": not upcaster.exists()}
    _add_upcaster(change, upcaster, templates.render("version", values)[upcaster], function)
    declared(settings, change)
    change.next_steps = templates.next_steps("version", values)
    return change


def merged(schemas: Iterable[EventSchema], but: Iterable[str] = ()) -> list[Column]:
    """The columns of several events. One that an event lacks is nullable; of several types are left out."""
    all_of = [{column.name: column for column in schema.columns} for schema in schemas]
    left_out = {*but, *properties.OURS}
    names = dict.fromkeys(name for columns in all_of for name in columns if name not in left_out)
    found = []
    for name in names:
        own = [columns[name] for columns in all_of if name in columns]
        if len({column.type for column in own}) == 1:
            is_nullable = len(own) < len(all_of) or any(column.is_nullable for column in own)
            found.append(own[0]._replace(is_nullable=is_nullable))
    return found


def _event(of: str, type_: str, every: Sequence[Property]) -> dict[Path, str]:
    if not catalog.TYPE.fullmatch(type_):
        raise unusable(f"event type {type_!r}", "it is no name", "begin with a letter; use letters, digits, _, . and -")
    document = {
        "$schema": DRAFT,
        "title": f"{of} {type_}, version 1",
        "type": "object",
        "required": [one.name for one in every if one.is_required],
        "properties": {one.name: one.rule for one in every},
        "examples": [{one.name: one.example for one in every}],
    }
    return _schema(of, type_, 1, document)


def _schema(of: str, type_: str, number: int, document: dict[str, Any]) -> dict[Path, str]:
    values = {"aggregate": of, "type": type_, "version": number, "document": document}
    return templates.render("schema", values)


def _table(made: Aggregate, table: str) -> dict[Path, str]:
    """The migration with a table that has the state, and the view of it."""
    properties.require_word(f"table {table!r}", table)
    for name in (table, f"source_{table}"):
        history.require_free("source", name)
    following = history.following("source")
    columns = merged(made.schemas, [made.key, str(made.version)])
    values = {"aggregate": made.name, "table": table, "key": made.key, "key_type": _type(made, made.key)}
    return templates.render(
        "table",
        {**values, "numbered": made.version, "columns": columns, "migration": following, "number": following.number},
    )


def _type(of: Aggregate, name: str) -> str:
    return next(column.type for column in of.schemas[0].columns if column.name == name)


def _numbered(version: str | None) -> list[Property]:
    if version is None:
        return []
    properties.require_column(version)
    return [Property(version, *NUMBER_OF_KEY)]


def _split(name: str) -> tuple[str, str]:
    of, _, type_ = name.partition(".")
    if not of or not type_:
        raise unusable(f"event {name!r}", "it has no aggregate type", "write AGGREGATE.TYPE, such as order.placed")
    return of, type_


def _aggregate(known: Catalog, name: str) -> Aggregate:
    if name not in known.aggregates:
        raise _unknown(f"aggregate type {name}", list(known.aggregates))
    return known.aggregates[name]


def _unknown(what: str, there_are: Sequence[str]) -> Exception:
    return unusable(what, "it is not declared", f"there are {', '.join(there_are) or 'none'} (`outbox events`)")


def _document(known: Catalog, schema: EventSchema) -> dict[str, Any]:
    """A schema as its file has it: references stay references."""
    found: dict[str, Any] = json.loads((known.folder / schema.file).read_text("utf-8"))
    return found


def _property_of(document: dict[str, Any], name: str) -> Property:
    example = next((one[name] for one in document.get("examples", ()) if name in one), None)
    return Property(name, document["properties"][name], example, example)


def _require_removable(of: Aggregate, document: dict[str, Any], removed: Sequence[str]) -> None:
    for name in removed:
        if name in (of.key, of.version):
            raise unusable(f"property {name}", f"events of {of.name} are ordered by it", "keep it")
        if name not in document.get("properties", {}):
            raise unusable(f"property {name}", "the event has no such property", "see its schema")


def _changed(
    document: dict[str, Any], number: int, given: Sequence[Property], removed: Sequence[str]
) -> dict[str, Any]:
    """A schema as its next version has it."""
    before = {name: rule for name, rule in document["properties"].items() if name not in removed}
    for one in given:
        if one.name in before:
            raise unusable(f"property {one.name}", "the event has it", "choose another name, or --remove it first")
    title = re.sub(r"version \d+", f"version {number}", document.get("title", f"version {number}"))
    found = {name: content for name, content in document.items() if name != "deprecated"}
    found["title"] = title
    found["required"] = [one for one in document.get("required", ()) if one not in removed]
    found["required"] += [one.name for one in given if one.is_required]
    found["properties"] = {**before, **{one.name: one.rule for one in given}}
    examples = {one.name: one.example for one in given}
    found["examples"] = [
        {**{name: value for name, value in example.items() if name not in removed}, **examples}
        for example in document.get("examples", ())
    ]
    return found


def _add_upcaster(change: Change, file: Path, text: str, function: str) -> None:
    """Write the function, or add it to the project's file."""
    if not file.exists():
        change.new[file] = text
        return
    before = file.read_text("utf-8")
    if function in upcasting.functions_in(file):
        raise unusable(f"upcaster {function}", f"{shown(file)} has a function of this name", "delete or rename it")
    if not re.search(r"\bAny\b", before):
        raise unusable(f"upcaster {function}", f"{shown(file)} does not import Any", "import it from typing there")
    change.edited[file] = f"{before.rstrip()}\n\n\n{text.lstrip()}"
