"""The topics that may hold events of the outbox, also those of earlier declarations.

An aggregate can be moved to another topic. Its older events stay on the former one, until that drops them.
"""

from __future__ import annotations

from contextlib import closing

from outbox.base.database import connect, database_errors
from outbox.base.settings import Settings, SinkRole
from outbox.events import catalog
from outbox.relay import connectors, routing

READ = "SELECT DISTINCT topic FROM public.positions ORDER BY topic"


def declared(settings: Settings) -> list[str]:
    """The topics of the catalog."""
    return sorted(catalog.of_project(settings).topics)


def former(settings: Settings, *, sinks: bool = True) -> list[str]:
    """Topics that are not in the catalog and may hold events: those that sinks have read, and default names.

    A captured table's topic holds none. ``sinks=False`` does not ask the sink database, which a chain may not have.
    """
    known = routing.default_topics(settings) | (set(_read(settings)) if sinks else set())
    captured = {topic for connector in connectors.others(settings) for topic in connector.topics}
    return sorted(known - captured - set(declared(settings)))


def all_names(settings: Settings) -> list[str]:
    """Both, whether they exist or not."""
    return [*declared(settings), *former(settings)]


def _read(settings: Settings) -> list[str]:
    with (
        closing(connect(settings, SinkRole.PRUNER)) as connection,
        database_errors(connection, "reading the positions of the sinks", "refused", "run the command again"),
        connection.cursor() as cursor,
    ):
        cursor.execute(READ)
        return [topic for (topic,) in cursor]
