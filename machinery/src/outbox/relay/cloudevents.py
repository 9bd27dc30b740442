"""CloudEvents 1.0 headers in Kafka's binary mode, beside ours, for projects that name their source.

The EventRouter copies columns of the outbox into headers, and Connect's transforms insert constants. ``ce_source`` is
the project's ``cloudevents-source`` with the aggregate type behind it, because ``ce_type``, a column, is the event type
within its aggregate type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from outbox.base.errors import Failure

Config = dict[str, str]

SOURCE = re.compile(r"[A-Za-z/][A-Za-z0-9._~:/@%-]*")  # what we take as a URI reference
COLUMNS = {"ce_id": "id", "ce_type": "type", "ce_time": "occurred_at", "ce_subject": "aggregateid"}
CONSTANTS = {"ce_specversion": "1.0", "content-type": "application/json"}
PLACEMENT = "transforms.outbox.table.fields.additional.placement"
TRANSFORMS = "org.apache.kafka.connect.transforms"


def source_of(source: str, aggregate: str) -> str:
    """The ``ce_source`` of the events of an aggregate type. Raises Failure `project-wrong` if that is no URI."""
    if not SOURCE.fullmatch(source):
        raise Failure(
            f"[tool.outbox] has cloudevents-source = {source!r}, which is no URI reference",
            'write a path or a URI of letters, digits and ._~:/@%-, such as "/shop" or "https://shop.example"',
            code="project-wrong",
        )
    return f"{source.rstrip('/')}/{aggregate}"


def add_headers(config: Config, source: str, topics: Mapping[str, str]) -> Config:
    """The configuration of the outbox's connector with the headers.

    ``topics``: by aggregate type, the topic that the EventRouter gives to its events. Raises Failure as `source_of`.
    """
    placed = [config.get(PLACEMENT, ""), *(f"{column}:header:{name}" for name, column in COLUMNS.items())]
    made = config | {PLACEMENT: ",".join(filter(None, placed)), "time.precision.mode": "isostring"}
    # Connect reads the literal of an InsertHeader, and would make the number 1 of 1.0. A field of the key stays a text;
    # the EventRouter replaces the key.
    name, value = "ce_specversion", CONSTANTS["ce_specversion"]
    made |= _transform("specversion", "InsertField$Key", {"static.field": name, "static.value": value})
    made |= _transform("specversion-header", "HeaderFrom$Key", {"fields": name, "headers": name, "operation": "copy"})
    made |= _insert("content-type", "content-type", CONSTANTS["content-type"])
    behind, predicates = ["content-type"], [config["predicates"]] if "predicates" in config else []
    for aggregate, topic in topics.items():
        alias = f"source-of-{aggregate}"
        made |= _insert(alias, "ce_source", source_of(source, aggregate)) | {
            f"transforms.{alias}.predicate": alias,
            f"predicates.{alias}.type": f"{TRANSFORMS}.predicates.TopicNameMatches",
            f"predicates.{alias}.pattern": re.escape(topic),
        }
        behind.append(alias)
        predicates.append(alias)
    routed = ["specversion", "specversion-header", config["transforms"], *behind]
    return made | {"transforms": ",".join(routed), "predicates": ",".join(predicates)}


def _insert(alias: str, header: str, value: str) -> Config:
    return _transform(alias, "InsertHeader", {"header": header, "value.literal": value})


def _transform(alias: str, kind: str, options: Config) -> Config:
    """The options of a transform of Connect."""
    named = {"type": f"{TRANSFORMS}.{kind}", **options}
    return {f"transforms.{alias}.{option}": content for option, content in named.items()}
