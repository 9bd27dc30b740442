"""Events, records and jobs of random operations."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import NamedTuple

from tests.support.made_events import DAY_MS, NOW_MS


class Event(NamedTuple):
    """An event of the source. ``total`` is that of its key, after it."""

    id: str
    key: str
    version: int
    type: str
    schema: int
    quantity: int
    total: int


class Record(NamedTuple):
    """A record of the topic: an event, or a record that the decoder refuses for the reason ``flaw``."""

    event: Event
    flaw: str = ""
    identity: str = ""

    @property
    def name(self) -> str:
        """The identity of its letter."""
        return self.identity or self.event.id


class Job(NamedTuple):
    """A job and its declarations. ``declared`` says which of these are added: the property "note", the version "v2",
    the event "paid".
    """

    names: tuple[str, ...]
    declared: frozenset[str]
    strategy: str

    def versions(self, type_: str) -> list[int]:
        """The declared versions of an event type."""
        if type_ == "paid":
            return [1] if "paid" in self.declared else []
        return [1, 2] if type_ == "placed" and "v2" in self.declared else [1]

    @property
    def wanted(self) -> dict[tuple[str, int], str]:
        """The versions of events that it takes, with the name by which it asks for each."""
        return {
            (type_, version): f"order.{type_}" + (f".v{version}" if f"order.{type_}.v{version}" in self.names else "")
            for type_ in ("placed", "cancelled", "paid")
            for version in self.versions(type_)
            if {"order", f"order.{type_}", f"order.{type_}.v{version}"} & {*self.names}
        }

    @property
    def asked(self) -> frozenset[tuple[str, int]]:
        """The names by which it asks for events, with their versions."""
        return frozenset((name, version) for (_, version), name in self.wanted.items())

    @property
    def wanted_names(self) -> set[str]:
        """The names that an event which it passes must not have."""
        names = (f"order.{type_},order.{type_}.v{schema},*.{type_}" for type_, schema in self.wanted)
        return {name for three in names for name in three.split(",")}

    def judge(self, record: Record, latest: str) -> str:
        """Why the record is no event; empty if it is one; what it is passed as, behind "skip ", if it is not taken.

        An event with an id greater than ``latest`` is from the future.
        """
        type_, schema = record.event.type, record.event.schema
        is_known, is_taken = bool(self.versions(type_)), (type_, schema) in self.wanted
        if not is_taken and not is_known and "order" not in self.names:
            return f"skip *.{type_}"
        if not is_taken and is_known and not {"order", f"order.{type_}"} & {*self.names}:
            has_others = any(type_ == one for one, _ in self.wanted)
            return f"skip order.{type_}" + (f".v{schema}" if has_others else "")
        if record.flaw not in ("not JSON", "missing id", "malformed id") and record.event.id > latest:
            return "id from the future"
        if is_taken or record.flaw in ("not JSON", "missing id", "malformed id"):
            return record.flaw
        return "unknown schema version" if is_known else "unknown event type"


def real_id(number: int, days_ago: int = 0) -> str:
    """A UUIDv7 that no other number has."""
    return uuid_text((NOW_MS - days_ago * DAY_MS + number) << 80 | 7 << 76 | 2 << 62 | number)


def day_of(event_id: str) -> date:
    """The day (UTC) of a UUIDv7."""
    return datetime.fromtimestamp(int(event_id.replace("-", "")[:12], 16) / 1000, UTC).date()


def real_uuid4(number: int) -> str:
    """A UUID that is no UUIDv7."""
    return uuid_text(4 << 76 | 2 << 62 | number)


def uuid_text(value: int) -> str:
    text = f"{value:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
