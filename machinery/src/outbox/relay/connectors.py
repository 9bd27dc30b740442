"""The connectors, each a file of connect/: `outbox` relays the events; any other captures a table as it is.

What a connector owns is named after it: its slot, its offsets topic and, except for the outbox, its publication. The
file says so; other modules ask here.

The EventRouter sends an event of the outbox to ``<topic-prefix>.<aggregate type>``. Behind it, a RegexRouter for each
aggregate with a topic of its own renames exactly this topic, and one does so for the markers of `outbox prune`. The
routers are rendered from the catalog. Managed Connect has RE2 for its regular expressions: no look-ahead, no groups
named as in Java.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SourceRole
from outbox.events import catalog
from outbox.events.catalog import Catalog
from outbox.kafka.spec import TopicSpec
from outbox.migrations import publication

Config = dict[str, str]

OUTBOX = "outbox"
REFERENCE = re.compile(r"\$\{settings:(\w+)\}")
# What `outbox migrate` makes, and no setting.
MADE = {"publication.name": publication.OUTBOX, "table.include.list": "public.outbox"}
MARKERS_RETENTION_MS = 24 * 3_600_000

TRANSFORMS = "transforms"
REPLACEMENT = "transforms.outbox.route.topic.replacement"
AGGREGATE_TYPE = "${routedByValue}"  # the EventRouter's word for it
OF_KAFKA = "org.apache.kafka.connect.transforms"
ROUTER = f"{OF_KAFKA}.RegexRouter"
ALIAS = "topic-of-"  # begins the name of each aggregate's RegexRouter
MARKERS_ROUTER = "prune-markers"

# CloudEvents 1.0 headers in Kafka's binary mode, beside ours. The EventRouter copies columns of the outbox into
# headers, and Connect's transforms insert constants.
SOURCE = re.compile(r"[A-Za-z/][A-Za-z0-9._~:/@%-]*")  # what we take as a URI reference
COLUMNS = {"ce_id": "id", "ce_type": "type", "ce_time": "occurred_at", "ce_subject": "aggregateid"}
CONSTANTS = {"ce_specversion": "1.0", "content-type": "application/json"}
PLACEMENT = "transforms.outbox.table.fields.additional.placement"


@dataclass(frozen=True)
class Connector:
    """One connector, with the configuration to send to Connect. The slot has the connector's name."""

    kind: str  # the name of its file
    name: str
    topics: tuple[str, ...]  # of its records: those of the catalog for the outbox, one for a captured table
    config: Config

    @property
    def is_outbox(self) -> bool:
        """Whether it relays the outbox: a table that keeps its events, so that missing ones can be sent again."""
        return self.kind == OUTBOX

    @property
    def publication(self) -> str:
        """The publication that it reads: created by a migration for the outbox, by `connect apply` for others."""
        return self.config["publication.name"]

    @property
    def table(self) -> tuple[str, str]:
        schema, _, name = self.config["table.include.list"].partition(".")
        return schema, name

    @property
    def topic(self) -> str:
        (topic,) = self.topics
        return topic

    @property
    def offsets_topic(self) -> str:
        """The topic in which Connect keeps the connector's offsets, in every mode.

        Not the worker's topic: a worker without exactly-once reads aborted offsets there too, and would continue after
        events that were never committed.
        """
        return self.config["offsets.storage.topic"]

    def command(self, verb: str) -> str:
        """The command for this connector: `outbox connect apply`, `outbox connect apply changes`."""
        return f"outbox connect {verb}" + ("" if self.is_outbox else f" {self.kind}")

    @property
    def start_again(self) -> str:
        """The remedy where changes are, or may be, missing on the topic."""
        effect = "resends the whole outbox table; idempotent sinks skip what they know"
        if not self.is_outbox:
            effect = f"a snapshot sends the present state of every row of {self.table[1]}, not the changes in between"
        return f"`{self.command('remove')} --drop-slot`, then `{self.command('apply')}`: {effect}"


def folder() -> Path:
    return project.current().connect


def kinds() -> list[str]:
    """The names of the files, that of the outbox first."""
    return sorted((file.stem for file in folder().glob("*.json")), key=lambda kind: (kind != OUTBOX, kind))


def load(settings: Settings, kind: str = OUTBOX) -> Connector:
    """The connector of a file, with each ``${settings:NAME}`` in it replaced.

    The outbox's also gets a router for each aggregate that has a topic of its own, and headers of CloudEvents if the
    project names their source. Raises Failure if it reads another table or publication than `outbox migrate` makes, or
    if something else writes an aggregate's topic.

    ``source_db_host`` and the like are parts of the database's URL as Connect sees it.

    A line is left out if its setting has no value. Other references, such as ``${secrets:KEY}`` of a password, stay: a
    config provider of the worker resolves them, so no configuration has a secret, nor the config topic.
    """
    seen = settings.connect_source_db_url or settings.source_db_url
    values = {
        **msgspec.structs.asdict(settings),
        **{f"source_db_{part}": value for part, value in msgspec.structs.asdict(seen).items()},
        "source_db_cdc_role": settings.role_name(SourceRole.CDC),
        "source_db_required_auth": settings.dsn(SourceRole.CDC).get("require_auth"),
        "exactly_once_support": "required" if settings.exactly_once else "requested",
    }

    def is_set(text: str) -> bool:
        return all(values[name] is not None for name in REFERENCE.findall(text))

    def replace(text: str) -> str:
        return REFERENCE.sub(lambda match: str(values[match[1]]), text)

    file = folder() / f"{kind}.json"
    written = json.loads(file.read_text())
    config = {key: replace(value) for key, value in written.items() if is_set(value)}
    if kind != OUTBOX:
        # Debezium's name for the topic of a table.
        captured = f"{config['topic.prefix']}.{config['table.include.list']}"
        return Connector(kind, config["slot.name"], (captured,), config)
    for key, made in MADE.items():
        if config.get(key) != made:
            raise Failure(
                f"{file}: {key} is {config.get(key)}, and `outbox migrate` makes {made}",
                f'write "{key}": "{made}"',
                code="connector-wrong",
            )
    events, source = catalog.of_project(settings), project.current().cloudevents_source
    if source:
        config = add_cloudevents_headers(config, source, {name: topic_of(config, name) for name in events.aggregates})
    config = add_routers(config, events, settings.markers_topic)
    connector = Connector(kind, config["slot.name"], tuple(events.topics), config)
    _require_own_topics(settings, connector, events)
    return connector


def every(settings: Settings) -> list[Connector]:
    """All connectors, in use or not; that of the outbox first."""
    return [load(settings, kind) for kind in kinds()]


def others(settings: Settings) -> list[Connector]:
    """All connectors except the outbox's, in use or not."""
    return [load(settings, kind) for kind in kinds() if kind != OUTBOX]


def topic_specs(settings: Settings, connector: Connector | None = None) -> list[TopicSpec]:
    """The topics that a connector writes; those of its records first."""
    connector = connector or load(settings)
    specs = []
    if connector.is_outbox:
        events = catalog.of_project(settings)
        for topic, aggregates in events.topics.items():
            specs.append(_records(settings, topic, aggregates[0].partitions))
    else:
        specs.append(_records(settings, connector.topic))
    # The others have one partition: an exactly-once transaction writes a marker to each partition that it touches.
    specs.append(TopicSpec(connector.offsets_topic, 1, {"cleanup.policy": "compact"}))
    if connector.is_outbox:
        markers = {"cleanup.policy": "delete", "retention.ms": str(MARKERS_RETENTION_MS)}
        specs.append(TopicSpec(settings.markers_topic, 1, markers))
    return specs


def _records(settings: Settings, topic: str, partitions: int | None = None) -> TopicSpec:
    config = {
        "cleanup.policy": "delete",
        "retention.ms": str(settings.topic_retention_hours * 3_600_000),
        # Retention counts from the arrival on the topic. By the time of the event, a record that arrives late after
        # an outage or with a first snapshot could be deleted before any sink has read it.
        "message.timestamp.type": "LogAppendTime",
    }
    return TopicSpec(topic, partitions or settings.topic_partitions, config)


def add_routers(config: Config, events: Catalog, markers: str) -> Config:
    """The configuration with a RegexRouter for each aggregate whose topic the EventRouter does not name, and one for
    the markers, whose topic is their aggregate type.
    """
    renamed = {
        f"{ALIAS}{aggregate.name}": (topic_of(config, aggregate.name), aggregate.topic)
        for aggregate in events.aggregates.values()
    }
    if AGGREGATE_TYPE in config.get(REPLACEMENT, ""):  # else this would rename every event
        renamed[MARKERS_ROUTER] = topic_of(config, markers), markers
    routed = dict(config)
    for alias, (default, topic) in renamed.items():
        if topic == default:
            continue
        routed[TRANSFORMS] = ",".join(filter(None, [routed.get(TRANSFORMS), alias]))
        routed |= {
            f"{TRANSFORMS}.{alias}.type": ROUTER,
            f"{TRANSFORMS}.{alias}.regex": re.escape(default),
            f"{TRANSFORMS}.{alias}.replacement": topic,
        }
    return routed


def topic_of(config: Mapping[str, str], aggregate_type: str) -> str:
    """The topic to which a connector of this configuration sends the events of an aggregate type."""
    topic = config.get(REPLACEMENT, "").replace(AGGREGATE_TYPE, aggregate_type)
    for alias in config.get(TRANSFORMS, "").split(","):
        if alias.startswith(ALIAS) and config.get(f"{TRANSFORMS}.{alias}.regex") == re.escape(topic):
            topic = config[f"{TRANSFORMS}.{alias}.replacement"]
    return topic


def default_topics(settings: Settings) -> set[str]:
    """The topics that the aggregates would have without names of their own. Some may have had them before."""
    return {f"{settings.topic_prefix}.{name}" for name in catalog.of_project(settings).aggregates}


def transforms(config: Mapping[str, str]) -> Config:
    """The part of a configuration that routes: every transform with its options."""
    return {key: value for key, value in config.items() if key.partition(".")[0] == TRANSFORMS}


def cloudevents_source_of(source: str, aggregate: str) -> str:
    """The ``ce_source`` of the events of an aggregate type, which stands behind the project's ``cloudevents-source``:
    ``ce_type``, a column, is the event type within it. Raises Failure `project-wrong` for no URI.
    """
    if not SOURCE.fullmatch(source):
        raise Failure(
            f"[tool.outbox] has cloudevents-source = {source!r}, which is no URI reference",
            'write a path or a URI of letters, digits and ._~:/@%-, such as "/shop" or "https://shop.example"',
            code="project-wrong",
        )
    return f"{source.rstrip('/')}/{aggregate}"


def add_cloudevents_headers(config: Config, source: str, topics: Mapping[str, str]) -> Config:
    """The configuration of the outbox's connector with headers of CloudEvents.

    ``topics``: by aggregate type, the topic that the EventRouter gives to its events. Raises Failure `project-wrong`.
    """
    placed = [config.get(PLACEMENT, ""), *(f"{column}:header:{name}" for name, column in COLUMNS.items())]
    made = config | {PLACEMENT: ",".join(filter(None, placed)), "time.precision.mode": "isostring"}
    # Connect reads the literal of an InsertHeader, and would make the number 1 of 1.0. A field of the key stays a text;
    # the EventRouter replaces the key.
    name, value = "ce_specversion", CONSTANTS["ce_specversion"]
    made |= _transform("specversion", "InsertField$Key", {"static.field": name, "static.value": value})
    made |= _transform("specversion-header", "HeaderFrom$Key", {"fields": name, "headers": name, "operation": "copy"})
    literal = CONSTANTS["content-type"]
    made |= _transform("content-type", "InsertHeader", {"header": "content-type", "value.literal": literal})
    behind, predicates = ["content-type"], [config["predicates"]] if "predicates" in config else []
    for aggregate, topic in topics.items():
        alias = f"source-of-{aggregate}"
        header = {"header": "ce_source", "value.literal": cloudevents_source_of(source, aggregate)}
        made |= _transform(alias, "InsertHeader", header) | {
            f"transforms.{alias}.predicate": alias,
            f"predicates.{alias}.type": f"{OF_KAFKA}.predicates.TopicNameMatches",
            f"predicates.{alias}.pattern": re.escape(topic),
        }
        behind.append(alias)
        predicates.append(alias)
    routed = ["specversion", "specversion-header", config["transforms"], *behind]
    return made | {"transforms": ",".join(routed), "predicates": ",".join(predicates)}


def _transform(alias: str, kind: str, options: Config) -> Config:
    """The options of a transform of Connect."""
    named = {"type": f"{OF_KAFKA}.{kind}", **options}
    return {f"transforms.{alias}.{option}": content for option, content in named.items()}


def _require_own_topics(settings: Settings, outbox: Connector, events: Catalog) -> None:
    """Each topic of events is written by the outbox alone, with the events of its aggregates. An aggregate type may be
    called `offsets`, and would get the topic of that name.
    """
    taken = {
        settings.connect_offsets_topic: "the worker's offsets",
        outbox.offsets_topic: "the connector's offsets",
        settings.markers_topic: "the markers of `outbox prune`",
        topic_of(outbox.config, settings.markers_topic): "renamed to that of the markers of `outbox prune`",
    }
    for other in others(settings):
        taken |= {other.offsets_topic: f"connector {other.name}'s offsets", other.topic: f"table {other.table[1]}'s"}
    for aggregate in events.aggregates.values():
        # The routers are a chain: one may rename what another has named.
        routed = topic_of(outbox.config, aggregate.name)
        renamed = "" if routed == aggregate.topic else f"renamed to that of another aggregate, {routed}"
        if problem := taken.get(aggregate.topic, renamed):
            raise Failure(
                f"topic {aggregate.topic} of aggregate {aggregate.name} is {problem}",
                f"give it another name: `topic` in connect/events/{aggregate.name}/aggregate.toml",
                code="topic-taken",
            )
