"""Appliers that call something for each new event: a handler, or what makes the records of a topic.

An event for which that fails is set aside, and later ones of its key wait for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from outbox.base.heavy import extensions, sql
from outbox.events.values import decode
from outbox.sink.applying.handlers.handler import Event
from outbox.sink.applying.postgres.applier import PostgresApplier
from outbox.sink.applying.projection import Projection
from outbox.sink.decoding.layout import view_name
from outbox.sink.spec import SinkSpec

# {key} and {version} are columns of the sink's table. The view of an event has its own, or those of a transform.
EVENTS = """
SELECT new.partition, new."offset", new.event_id::text, new.{{key}}::text, {version},
       (to_jsonb(one.*) - ARRAY['event_id', 'partition', 'offset'])::text
  FROM pg_temp.new_events AS new
  JOIN {view} AS one ON one.partition = new.partition AND one."offset" = new."offset"
 WHERE {condition}
"""
UTC = "+00:00"  # as Postgres writes it; schemas mostly want the other spelling


class NewEvent(NamedTuple):
    """A new event of a batch, and the place of its record."""

    partition: int
    offset: int
    event: Event


class CallingApplier(PostgresApplier):
    """Applies new events by calls, in the order of their topic. A subclass makes them, in `_project`."""

    condition = "true"
    """The SQL that says of a row of ``new_events``, as ``new``, whether there is a call for it."""

    def __init__(self, spec: SinkSpec, _: Sequence[Projection] | None = None) -> None:
        super().__init__(spec, ())
        self._is_ordered = any(decoder.version is not None for decoder in spec.decoders.values())
        self._views = {event: sql.Identifier("pg_temp", view_name(event)) for event in spec.layout.types}

    def _new(self, cursor: extensions.cursor, parameters: Mapping[str, Any]) -> list[NewEvent]:
        """The new events, in the order of the topic; those of a key in the order of their versions, which is another
        one where partitions were added.
        """
        found = list[NewEvent]()
        is_numbered = "version" in self._names[parameters["topic"]]
        version = sql.SQL("new.{version}" if is_numbered else "NULL::bigint")
        for name, columns in self._decoders[parameters["topic"]].types.items():
            moments = [column.name for column in columns if column.type == "timestamptz"]
            names = {"view": self._views[name], "version": version, "condition": sql.SQL(self.condition)}
            self._execute(cursor, sql.SQL(EVENTS).format(**names).as_string(cursor), parameters)
            for partition, offset, event_id, key, number, text in cursor:
                payload = decode(text.encode())
                for moment in moments:
                    if isinstance(said := payload.get(moment), str) and said.endswith(UTC):
                        payload[moment] = f"{said.removesuffix(UTC)}Z"
                found.append(NewEvent(partition, offset, Event(event_id, name, key, number, payload)))
        found.sort(key=lambda one: one[:2])
        if not is_numbered:
            return found
        of_keys = defaultdict[str, deque[NewEvent]](deque)
        for one in sorted(found, key=lambda one: one.event.version or 0):
            of_keys[one.event.key].append(one)
        return [of_keys[one.event.key].popleft() for one in found]

    def _failures(self, events: Sequence[NewEvent], call: Callable[[NewEvent], str | None]) -> dict[str, str]:
        """Call for each of these. Returns by event id how a call has failed, as it says."""
        problems = dict[str, str]()
        failed_at = dict[str, int]()  # by key the first version that has failed
        for one in events:
            event = one.event
            if event.version is not None and event.version > failed_at.get(event.key, event.version):
                continue  # PARK_BEHIND_VERSION says the same of it
            if (problem := call(one)) is not None:
                problems[event.id] = problem
                if event.version is not None:
                    failed_at.setdefault(event.key, event.version)
        return problems
