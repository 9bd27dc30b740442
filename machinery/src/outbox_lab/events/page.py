"""The declared events as one HTML page, which loads nothing and runs no script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from outbox.base.project import Project
from outbox.events.catalog import Aggregate, Catalog
from outbox.events.schema import EventSchema
from outbox.relay.cloudevents import source_of
from outbox.sink.spec import SinkJob
from outbox_lab.events.consumers import Consumers
from outbox_lab.events.properties import differences, properties

TEMPLATES = Path(__file__).with_name("templates")
TEMPLATE = "events.html.j2"


def render(of: Project, known: Catalog, consumers: Consumers) -> str:
    """The page of a project's events. Whatever a declaration says is shown as text."""
    source = of.cloudevents_source
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["as_json"] = lambda value: json.dumps(value, indent=2, ensure_ascii=False)
    return environment.get_template(TEMPLATE).render(
        project=of,
        aggregates=[
            {
                "of": aggregate,
                "source": source_of(source, aggregate.name) if source else "",
                "events": list(_events(aggregate, consumers)),
            }
            for aggregate in known.aggregates.values()
        ],
        sinks=[_sink(job, known, consumers) for job in consumers.jobs],
        notes=consumers.notes,
    )


def _events(aggregate: Aggregate, consumers: Consumers) -> Iterator[dict[str, Any]]:
    for type_, versions in aggregate.events.items():
        before = {new.version: (old, differences(old, new)) for old, new in pairwise(versions.values())}
        yield {
            "name": f"{aggregate.name}.{type_}",
            "versions": [
                {
                    "schema": schema,
                    "properties": properties(schema),
                    "sinks": [job.name for job in consumers.by_version.get(schema.name, ())],
                    "before": before.get(schema.version),
                }
                for schema in reversed([*versions.values()])
            ],
        }


def _sink(job: SinkJob, known: Catalog, consumers: Consumers) -> dict[str, Any]:
    taken: list[EventSchema] = [one for one in known.schemas if job in consumers.by_version.get(one.name, ())]
    return {
        "name": job.name,
        "strategy": Path(job.strategy).stem,
        "target": "sink database" if job.target is None else type(job.target).__name__,
        "transform": job.transform or "",
        "takes": [schema.name for schema in taken],
        "decoders": {topic: type(decoder).__name__ for topic, decoder in job.decoders.items()},
    }
