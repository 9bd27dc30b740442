"""A deadline for a database that does not answer: frozen, or behind a network that swallows its packets.

TCP does not notice a server whose kernel still acknowledges. A limit for statements would not do either: a large batch,
or a lock, may take longer than anybody wants to wait for a dead server. So when a sink that is at work has made no
progress for a while, the server is asked something that it answers without a login: whether it speaks TLS. If it does
not answer that either, the sink's connections are hung up, whatever it waits for. They are hung up too if the server
has ended one: a function of the adopter's that never returns would never see that.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from psycopg2 import extensions

from outbox.base import log
from outbox.base.database import hang_up, is_cut_off
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import timeout_scale

POLL_S = 1.0
SILENCE_S = 30.0
ANSWER_TIMEOUT_S = 5.0
QUESTIONS = 2  # without an answer, one after the other
# https://www.postgresql.org/docs/18/protocol-message-formats.html: SSLRequest, answered by one byte.
SSL_REQUEST = struct.pack("!ii", 8, 80877103)

_log = log.get(__name__)


class Guard:
    """The watchdog's view of one sink. `failure` says that the database was given up during the last work."""

    def __init__(self, sink: str) -> None:
        self.sink = sink
        self.failure: Failure | None = None
        self._connections: Sequence[extensions.connection] = ()
        self._since: float | None = None

    @contextmanager
    def working(self, connections: Sequence[extensions.connection]) -> Iterator[None]:
        """Within the block the sink works with its database. One block at a time, but for one that was given up."""
        self._connections, self.failure = connections, None
        self.progress()
        try:
            yield
        finally:
            if self._connections is connections:
                self._since = None

    def progress(self) -> None:
        """The database has done something of the work."""
        self._since = time.monotonic()

    def silent_s(self) -> float:
        """For how long the sink has worked without progress."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def give_up(self, what: str, remedy: str, code: str) -> None:
        """End what waits for the database."""
        self.failure, self._since = Failure(f"sink {self.sink}: {what}", remedy, code=code), None
        for connection in self._connections:
            hang_up(connection)

    def is_cut_off(self) -> bool:
        """Whether the server has ended a connection of the work."""
        return any(map(is_cut_off, self._connections))


class Watchdog:
    """Looks after the sinks of one process, in a thread of its own, within the block."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._guards: list[Guard] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def guard(self, sink: str) -> Guard:
        """Look after a sink too."""
        self._guards.append(Guard(sink))
        return self._guards[-1]

    def _watch(self) -> None:
        reported_at: dict[str, float] = {}
        while not self._ended.wait(POLL_S):
            silence_s = SILENCE_S * timeout_scale()
            silent = [guard for guard in [*self._guards] if guard.silent_s() > silence_s]
            for guard in silent:
                if guard.is_cut_off():
                    what = f"the server has ended a connection, after {guard.silent_s():.0f} s in one batch"
                    guard.give_up(what, "give the calls in a handler a timeout", "database-connection-lost")
            silent = [guard for guard in silent if guard.failure is None]
            due = [one for one in silent if time.monotonic() - reported_at.get(one.sink, -silence_s) >= silence_s]
            if not due:
                continue
            if any(self._answers() for _ in range(QUESTIONS)):
                for guard in due:
                    reported_at[guard.sink] = time.monotonic()
                    waited_s = round(guard.silent_s())
                    _log.warning("no progress, and the database answers others", sink=guard.sink, waited_s=waited_s)
                continue
            where = ":".join(map(str, self._settings.sink_db_url.server))
            for guard in silent:
                what = f"the database at {where} has not answered for {guard.silent_s():.0f} s"
                guard.give_up(what, "find out why it hangs; the sink starts again by itself", "database-silent")

    def _answers(self) -> bool:
        """Whether the server answers a connection of anybody. A refusal is an answer: then the sink gets an error."""
        host, port = self._settings.sink_db_url.server
        is_path = host.startswith("/")
        try:
            question = (
                socket.socket(socket.AF_UNIX) if is_path else socket.create_connection((host, port), ANSWER_TIMEOUT_S)
            )
            with question:
                if is_path:
                    question.settimeout(ANSWER_TIMEOUT_S)
                    question.connect(f"{host}/.s.PGSQL.{port}")
                question.sendall(SSL_REQUEST)
                question.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True
        return True
