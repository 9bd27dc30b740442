"""outbox events: list what is declared, check it, write typed payloads, and show others what is published."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from outbox.base import project
from outbox.base.errors import Failure, plural
from outbox.base.settings import load
from outbox.commands import table
from outbox.events import catalog
from outbox.events.catalog import Aggregate, Catalog
from outbox.events.schema import Column, EventSchema
from outbox_lab.events import checks
from outbox_lab.events.checks import Consumers

# What SQL reads without quotes, and the columns that each table has beside those of events.
BARE = re.compile(r"(?!offset\Z)[a-z_][a-z0-9_]*")
PLACE = (Column("event_id", "uuid", False), Column("partition", "bigint", False), Column("offset", "bigint", False))
HEADINGS = ("aggregate", "topic", "event", "versions", "key", "version", "consumers")


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")
@click.pass_context
def events(context: click.Context, as_json: bool) -> None:
    """List the declared events: aggregate, topic, versions, key, and the sinks that take them.

    \b
    The keys of --json are stable, a list of:
      aggregate, topic, partitions, key, version, event,
      versions   version, deprecated, consumers (names of sinks)
    """
    if context.invoked_subcommand is not None:
        return
    settings = load()
    known = catalog.of_project(settings)
    found = checks.consumers(settings, known)
    rows = [
        _row(aggregate, versions, found)
        for aggregate in known.aggregates.values()
        for versions in aggregate.events.values()
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        click.echo(table(HEADINGS, [*map(_cells, rows)]) if rows else "no events are declared")
    for note in found.notes:
        click.echo(f"note: {note}", err=True)


@events.command()
@click.option("--against", "published", metavar="REV", help="Also compare with the events of this git revision.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")
def check(published: str | None, as_json: bool) -> None:
    """Check examples, upcasters, typed payloads, and what the project's sinks make of the events; with --against,
    refuse edits that break readers. Status 1 if a problem is found.

    \b
    The keys of --json are stable, a list of:
      rule, property (empty if it is not one), message,
      file (in the folder of events, `sink NAME`, or the module of typed payloads)
    """
    from outbox_lab.events import compatibility, payloads, revision  # which the list does not need

    # The topics' names of the project, wherever this runs: the revision knows no environment.
    settings = load(environment=False, topic_prefix=project.current().topic_prefix)
    known = catalog.of_project(settings)
    edits = []
    if published is not None:
        before = revision.published(project.current(), published, settings.topic_partitions)
        edits = compatibility.compare(before, known)
    of_sinks, note = checks.sinks(settings)
    found = checks.examples(known) + payloads.check(project.current(), known) + edits + of_sinks
    if note:
        click.echo(f"note: {note}", err=True)
    if as_json:
        click.echo(json.dumps([finding.as_dict() for finding in found], indent=2))
    else:
        for finding in found:
            click.echo(str(finding))
    if found:
        raise Failure(
            f"{plural(len(found), 'problem')} found; first: {found[0]}",
            "docs/events.md says which edit needs a new version" if edits else "correct the named files",
            code="problems-found",
        )
    if not as_json:
        click.echo(_summary(known, published))


@events.command()
def types() -> None:
    """Write typed payloads: a module with a class for each version of an event that may be written.

    The module is service/payloads.py, or what `payloads` in [tool.outbox] names.
    """
    from outbox_lab.events import payloads

    of = project.current()
    click.echo(f"written: {payloads.write(of, catalog.of_project(load())).relative_to(of.root)}")


@events.command()
@click.option("--asyncapi", metavar="[FILE]", is_flag=False, flag_value="-", required=True)
def export(asyncapi: str) -> None:
    """Write the declared events for others, as an AsyncAPI 3.0 document. Without FILE, to standard output."""
    from outbox_lab.events.asyncapi import document

    of = project.current()
    known = catalog.of_project(load(environment=False, topic_prefix=of.topic_prefix))
    text = f"{json.dumps(document(of, known), indent=2, ensure_ascii=False)}\n"
    if asyncapi == "-":
        click.echo(text, nl=False)
        return
    try:
        Path(asyncapi).write_text(text, "utf-8")
    except OSError as error:
        raise Failure(
            f"{asyncapi} cannot be written: {error.strerror}",
            "name a file in an existing folder",
            code="file-not-written",
        ) from None
    click.echo(f"written: {asyncapi}")


@events.command()
@click.option("--registry", "url", metavar="URL", envvar="SCHEMA_REGISTRY_URL", required=True, show_envvar=True)
def publish(url: str) -> None:
    """Publish the schemas of events to a schema registry, by the REST API of Confluent's: what it has stays as it is.

    Each version of an event has a subject, TOPIC-AGGREGATE.EVENT.vN. Events with `published = false` are left out. The
    login is SCHEMA_REGISTRY_USER_INFO=NAME:PASSWORD, or SCHEMA_REGISTRY_TOKEN. Status 1 if a schema is refused.
    """
    from outbox_lab.events import registry

    known = catalog.of_project(load(environment=False, topic_prefix=project.current().topic_prefix))
    server = registry.Registry(url, registry.login(os.environ))
    for aggregate in [name for name, one in known.aggregates.items() if not one.published]:
        click.echo(f"note: {aggregate} is left out: published = false", err=True)
    subjects, refused = registry.subjects(known), list[str]()
    for subject, schema in subjects.items():
        if reason := server.register(subject, schema):
            refused.append(f"{subject}: {reason}")
        click.echo(f"refused    {refused[-1]}" if reason else f"published  {subject}")
    if not subjects:
        click.echo("no event is published: the registry is not asked")
    if refused:
        raise Failure(
            f"the registry refuses {plural(len(refused), 'schema')}; first: {refused[0]}",
            "declare a new version, or change the compatibility of the subject in the registry",
            code="schemas-refused",
        )


@events.command()
@click.argument("sink")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")
def columns(sink: str, as_json: bool) -> None:
    """List what the projections of a sink can read: the columns of each event's view, and of new_events.

    \b
    The keys of --json are stable, a list of:
      table, column (quoted where SQL needs it), type, nullable
    """
    from outbox.sink import discovery

    settings = load()
    usable, failures = discovery.usable(settings, [sink])
    if failures:
        raise failures[sink]
    layout, transform = usable[0].layout, usable[0].job.transform
    tables = {view: layout.types[event] for view, event in layout.views.items()} | {"new_events": layout.columns}
    if transform is not None:
        click.echo(f"note: the projections see what {transform} returns of these columns", err=True)
        tables = {"(transform)": layout.columns}
    rows = [
        (of, one.name if BARE.fullmatch(one.name) else f'"{one.name}"', one.type, one.is_nullable)
        for of, found in tables.items()
        for one in (*PLACE, *found)
    ]
    headings = ("table", "column", "type", "nullable")
    if as_json:
        click.echo(json.dumps([dict(zip(headings, row, strict=True)) for row in rows], indent=2))
    else:
        click.echo(table(headings, [(*row[:3], "yes" if row[3] else "") for row in rows]))


def _row(aggregate: Aggregate, versions: Mapping[int, EventSchema], found: Consumers) -> dict[str, Any]:
    return {
        "aggregate": aggregate.name,
        "topic": aggregate.topic,
        "partitions": aggregate.partitions,
        "key": aggregate.key,
        "version": aggregate.version,
        "event": next(iter(versions.values())).event,
        "versions": [
            {
                "version": version,
                "deprecated": schema.is_deprecated,
                "consumers": [*found.by_version.get(schema.name, ())],
            }
            for version, schema in versions.items()
        ],
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    versions = [f"{one['version']}{' (deprecated)' if one['deprecated'] else ''}" for one in row["versions"]]
    return (
        row["aggregate"],
        row["topic"],
        row["event"],
        ", ".join(versions),
        row["key"],
        row["version"] or "-",
        ", ".join(_takers(row["versions"])) or "-",
    )


def _takers(versions: list[dict[str, Any]]) -> Iterator[str]:
    """The sinks of an event; with the versions that they take, if these are not all."""
    names = dict.fromkeys(name for one in versions for name in one["consumers"])
    for name in names:
        taken = [f"v{one['version']}" for one in versions if name in one["consumers"]]
        yield name if len(taken) == len(versions) else f"{name} ({', '.join(taken)})"


def _summary(known: Catalog, published: str | None) -> str:
    count = sum(len(schema.examples) for schema in known.schemas)
    done = f"valid: {plural(len(known.schemas), 'version')} of events, {plural(count, 'example')}"
    if published is None:
        return done
    unpublished = [name for name, aggregate in known.aggregates.items() if not aggregate.published]
    left_out = f"; not published, not compared: {', '.join(unpublished)}" if unpublished else ""
    return f"{done}; no edit since {published} breaks a reader{left_out}"
