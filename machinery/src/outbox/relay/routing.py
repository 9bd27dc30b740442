"""How the connector of the outbox routes events: from the aggregate type to the topic that the catalog names.

The EventRouter sends an event to ``<topic-prefix>.<aggregate type>``. Behind it, a RegexRouter for each aggregate with
a topic of its own renames exactly this topic. The routers are rendered from the catalog: nobody writes them by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.events.catalog import Aggregate, Catalog

Config = dict[str, str]

TRANSFORMS = "transforms"
REPLACEMENT = "transforms.outbox.route.topic.replacement"
AGGREGATE_TYPE = "${routedByValue}"  # the EventRouter's word for it
ROUTER = "org.apache.kafka.connect.transforms.RegexRouter"
ALIAS = "topic-of-"  # begins the name of each RegexRouter


def add_routers(config: Config, catalog: Catalog) -> Config:
    """The configuration with a RegexRouter for each aggregate whose topic the EventRouter does not name."""
    routed = dict(config)
    for aggregate in catalog.aggregates.values():
        default = topic_of(config, aggregate.name)
        if aggregate.topic == default:
            continue
        alias = f"{ALIAS}{aggregate.name}"
        routed[TRANSFORMS] = ",".join(filter(None, [routed.get(TRANSFORMS), alias]))
        routed |= {
            f"{TRANSFORMS}.{alias}.type": ROUTER,
            f"{TRANSFORMS}.{alias}.regex": re.escape(default),
            f"{TRANSFORMS}.{alias}.replacement": aggregate.topic,
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


def require_own_topics(aggregates: Iterable[Aggregate], taken: Mapping[str, str]) -> None:
    """Raise Failure `topic-taken` if an aggregate has a topic that something else writes. ``taken`` says what."""
    for aggregate in aggregates:
        if aggregate.topic in taken:
            raise Failure(
                f"topic {aggregate.topic} of aggregate {aggregate.name} is {taken[aggregate.topic]}",
                f"give it another name: `topic` in connect/events/{aggregate.name}/aggregate.toml",
                code="topic-taken",
            )
