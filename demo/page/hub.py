"""The content of the page as one document, and the subscribers that get each change.

Each change is serialised once, however many subscribers there are. A subscriber that is too slow gets the whole
document again, in place of the changes that it missed.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CHANGES_KEPT = 100  # for subscribers that are a little behind
HEARTBEAT_S = 15.0
HEARTBEAT = b": still here\n\n"

Json = Any


class Hub:
    """A document of *parts*, which are replaced, *logs*, which grow at their end, and *tables*, whose rows are changed
    by their ``id``. Logs and tables are bounded: the oldest entries are dropped. Any thread may call each method.
    """

    def __init__(self, logs: Mapping[str, int], tables: Mapping[str, int]) -> None:
        """The logs and the tables, each with its greatest length."""
        self._changed = threading.Condition()
        self._limits = {**logs, **tables}
        self.parts: dict[str, Json] = {}
        self.logs: dict[str, list[Json]] = {name: [] for name in logs}
        self._tables: dict[str, dict[str, Json]] = {name: {} for name in tables}
        self._version = 0
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=CHANGES_KEPT)
        self._whole: tuple[int, bytes] = (-1, b"")
        self._subscribers = 0
        self._is_closed = False

    @property
    def subscribers(self) -> int:
        """How many there are now."""
        return self._subscribers

    def part(self, name: str) -> Json:
        """A part as it is now; None if it does not exist."""
        with self._changed:
            return self.parts.get(name)

    def publish(
        self,
        parts: Mapping[str, Json] | None = None,
        logs: Mapping[str, Sequence[Json]] | None = None,
        tables: Mapping[str, Sequence[Json]] | None = None,
    ) -> None:
        """Replace parts, append to logs, change rows. Parts that are as they were are not sent."""
        with self._changed:
            change: dict[str, Json] = {}
            fresh = {name: value for name, value in (parts or {}).items() if self.parts.get(name) != value}
            if fresh:
                self.parts.update(fresh)
                change["parts"] = fresh
            grown = {name: list(entries) for name, entries in (logs or {}).items() if entries}
            for name, entries in grown.items():
                self.logs[name] = [*self.logs[name], *entries][-self._limits[name] :]
            if grown:
                change["logs"] = grown
            rows = {name: list(changed) for name, changed in (tables or {}).items() if changed}
            for name, changed in rows.items():
                self._change_rows(name, changed)
            if rows:
                change["tables"] = rows
            if not change:
                return
            self._version += 1
            self._recent.append((self._version, _frame("change", change)))
            self._changed.notify_all()

    def clear_log(self, name: str) -> None:
        """Empty a log. Subscribers get the whole document again."""
        with self._changed:
            self.logs[name] = []
            self._recent.clear()
            self._version += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End every subscription."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait_for_subscribers(self, timeout_s: float) -> bool:
        """Wait for a subscriber. Returns whether there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: self._subscribers > 0 or self._is_closed, timeout_s)

    def subscribe(self) -> Iterator[bytes]:
        """The whole document, and then each change, as frames of server-sent events; until the hub is closed."""
        with self._changed:
            self._subscribers += 1
            self._changed.notify_all()
        try:
            seen = -1
            while True:
                frames, seen = self._after(seen)
                if not frames:
                    return
                yield from frames
        finally:
            with self._changed:
                self._subscribers -= 1

    # ----------------------------------------------------------------------------------------------------------------

    def _after(self, seen: int) -> tuple[list[bytes], int]:
        """The frames after a version, and the version that they lead to. No frames: the hub is closed."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._is_closed or self._version != seen, HEARTBEAT_S)
            if self._is_closed:
                return [], seen
            if not arrived:
                return [HEARTBEAT], seen
            oldest = self._recent[0][0] if self._recent else self._version + 1
            if seen < 0 or seen + 1 < oldest:
                return [self._document()], self._version
            return [frame for version, frame in self._recent if version > seen], self._version

    def _document(self) -> bytes:
        if self._whole[0] != self._version:
            tables = {name: list(rows.values()) for name, rows in self._tables.items()}
            whole = {"parts": self.parts, "logs": self.logs, "tables": tables, "limits": self._limits}
            self._whole = (self._version, _frame("whole", whole))
        return self._whole[1]

    def _change_rows(self, name: str, changed: Sequence[Json]) -> None:
        rows = self._tables[name]
        rows.update({row["id"]: row for row in changed})
        for row_id in list(rows)[: max(0, len(rows) - self._limits[name])]:
            del rows[row_id]


def _frame(event: str, content: Json) -> bytes:
    return f"event: {event}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n".encode()
