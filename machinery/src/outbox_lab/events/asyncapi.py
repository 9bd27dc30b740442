"""The declared events as an AsyncAPI 3.0 document that refers to nothing outside of it.

A topic is a channel, and each version of an event is a message. AsyncAPI reads payloads as JSON Schema of draft 7, and
our schemas are of draft 2020-12. So keywords are translated where draft 7 has another name for them, and a `$ref`
beside which other keywords stand becomes an `allOf`. Draft 7 has nothing like `unevaluatedProperties`,
`unevaluatedItems`, `minContains`, `maxContains` and the formats `uuid` and `duration`: readers may ignore them.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from outbox.base import project
from outbox.base.project import Project
from outbox.events.catalog import Aggregate, Catalog
from outbox.events.references import MAPS
from outbox.events.schema import CANONICAL_UUID, PERSONAL, EventSchema
from outbox.relay import connectors
from outbox_lab.events.expansion import mapped

Json = Any

VERSION = "3.0.0"
BINDING = "0.5.0"
JSON_TYPE = "application/json"
EVENT_ID = "01a1fc75-167d-7239-af57-d1ee1a62e0a6"  # of the examples
TIME = "2026-11-21T10:00:00.123456Z"
RENAMED = {"prefixItems": "items", "dependentSchemas": "dependencies"}  # keywords that draft 7 knows by other names
KEYS: Mapping[str, Json] = {"uuid": {"format": "uuid", "pattern": CANONICAL_UUID}, "bigint": {"pattern": "^-?[0-9]+$"}}


def document(of: Project, known: Catalog) -> dict[str, Json]:
    """The AsyncAPI document of a project's events, with every declared version."""
    messages, schemas = {}, {}
    for aggregate in known.aggregates.values():
        for schema in aggregate.schemas:
            content = {keyword: content for keyword, content in schema.document.items() if keyword != "examples"}
            schemas[schema.name] = _draft_7(content, schema)
            messages[schema.name] = _message(schema, aggregate, of.cloudevents_source)
    return {
        "asyncapi": VERSION,
        "info": _info(of),
        "defaultContentType": JSON_TYPE,
        "channels": {topic: _channel(topic, aggregates) for topic, aggregates in known.topics.items()},
        "operations": {
            f"send.{topic}": {"action": "send", "channel": {"$ref": f"#/channels/{topic}"}} for topic in known.topics
        },
        "components": {"messages": messages, "schemas": schemas},
    }


def _info(of: Project) -> dict[str, str]:
    file = of.root / project.FILE
    table = tomllib.loads(file.read_text()).get("project", {}) if file.exists() else {}
    info = {"title": table.get("name", of.topic_prefix), "version": table.get("version", "0.0.0")}
    return info | _some(table, "description")


def _channel(topic: str, aggregates: Sequence[Aggregate]) -> dict[str, Json]:
    first = aggregates[0]
    numbered = "" if first.version is None else f", numbered by {first.version}"
    names = [schema.name for aggregate in aggregates for schema in aggregate.schemas]
    return {
        "address": topic,
        "title": ", ".join(aggregate.name for aggregate in aggregates),
        "description": f"Events with the same {first.key} are in order{numbered}. An event may be delivered again.",
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
        "bindings": {"kafka": {"topic": topic, "partitions": first.partitions, "bindingVersion": BINDING}},
    }


def _message(schema: EventSchema, aggregate: Aggregate, source: str) -> dict[str, Json]:
    [key] = [column for column in schema.columns if column.name == aggregate.key]
    headers = _headers(schema, connectors.cloudevents_source_of(source, aggregate.name) if source else "")
    marks = {"deprecated": schema.is_deprecated, "personal-data": schema.is_personal}
    examples = [one for one in schema.examples if schema.violation(one) is None]  # `outbox events check` names others
    kafka_key = {"type": "string", "description": f"The payload's {key.name}, as text.", **KEYS.get(key.type, {})}
    return {
        "name": schema.name,
        **_some(schema.document, "title", "description"),
        "contentType": JSON_TYPE,
        **({"tags": [{"name": name} for name, is_set in marks.items() if is_set]} if any(marks.values()) else {}),
        **({"x-deprecated": True} if schema.is_deprecated else {}),
        **({PERSONAL: True} if schema.is_personal else {}),
        "headers": {"type": "object", "required": sorted({*headers} - {"traceparent"}), "properties": headers},
        "payload": {"$ref": f"#/components/schemas/{schema.name}"},
        "bindings": {"kafka": {"key": kafka_key, "bindingVersion": BINDING}},
        "examples": [
            {"name": f"example-{number}", "headers": _example(headers, str(payload[key.name])), "payload": payload}
            for number, payload in enumerate(examples, start=1)
        ],
    }


def _some(table: Mapping[str, Json], *names: str) -> dict[str, Json]:
    return {name: table[name] for name in names if name in table}


def _headers(schema: EventSchema, source: str) -> dict[str, Json]:
    """The headers of a record as the relay writes them; with a source, those of CloudEvents too."""
    event_id = {"type": "string", "format": "uuid", "description": "The event's id; a repeated event has it again."}
    made: dict[str, Json] = {
        "id": event_id,
        "eventType": {"type": "string", "const": schema.type},
        "schemaVersion": {"type": "string", "const": str(schema.version)},
        "traceparent": {
            "type": ["string", "null"],
            "description": "The W3C trace context of the request; no value if the request had none.",
        },
    }
    if source:
        texts: dict[str, Json] = {name: {"type": "string"} for name in connectors.COLUMNS}
        constants = {"ce_type": schema.type, "ce_source": source, **connectors.CONSTANTS}
        texts |= {name: {"type": "string", "const": value} for name, value in constants.items()}
        made |= texts | {"ce_id": event_id, "ce_time": {"type": "string", "format": "date-time"}}
    return made


def _example(headers: Mapping[str, Json], key: str) -> dict[str, Json]:
    values = {"id": EVENT_ID, "ce_id": EVENT_ID, "ce_time": TIME, "ce_subject": key}
    return {name: values.get(name, rule.get("const")) for name, rule in headers.items()}


def _draft_7(rule: Json, schema: EventSchema) -> Json:
    """A rule of a schema in the words of draft 7."""
    if not isinstance(rule, dict):
        return rule
    made: dict[str, Json] = {}
    for keyword, content in rule.items():
        translated = mapped(keyword, content, lambda one: _draft_7(one, schema))
        if keyword == "items" and "prefixItems" in rule:
            made["additionalItems"] = translated
        elif keyword in ("dependentRequired", "dependentSchemas"):  # draft 7 has one keyword for both
            made.setdefault("dependencies", {}).update(translated)
        elif keyword == "enum":  # draft 7 wants each value once
            made["enum"] = list({json.dumps(value, sort_keys=True): value for value in content}.values())
        elif keyword not in ("$schema", "$ref"):
            made[RENAMED.get(keyword) or keyword] = translated
    if "$ref" not in rule:
        return made
    reference = {"$ref": f"#/components/schemas/{schema.name}{_place(rule['$ref'])}"}
    return {**made, "allOf": [*made.get("allOf", []), reference]} if made else reference


def _place(reference: str) -> str:
    """The place of a reference's target, as draft 7 names it. Behind a keyword such as `properties` stands a name."""
    words, is_name = list[str](), False
    for word in reference.removeprefix("#").split("/"):
        words.append(word if is_name else RENAMED.get(word, word))
        is_name = not is_name and word in MAPS
    return "/".join(words)
