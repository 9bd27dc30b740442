"""Events written to the outbox, each row in a transaction of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from threading import Event

from outbox.base.database import connect
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for

ACCOUNTS = 100  # enough for every partition to get some
STATEMENT_COMMITS = 50  # in one round trip
WRITE_TIMEOUT_S = 600.0
POLL_S = 0.01
# A credit of 1 to each account in turn.
WRITE = """
DO $$
BEGIN
    FOR number IN {first}..{last} LOOP
        INSERT INTO outbox (aggregatetype, aggregateid, type, payload)
        SELECT 'balance', account, 'credited',
               jsonb_build_object('transfer_id', gen_random_uuid(), 'account_id', account, 'amount', 1,
                                  'currency', 'EUR', 'balance_after', version, 'version', version,
                                  'occurred_at', to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
          FROM (SELECT format('00000000-0000-7000-8000-%s', lpad((number % {accounts})::text, 12, '0')) AS account,
                       number / {accounts} + 1 AS version) AS credit;
        COMMIT;
    END LOOP;
END $$
"""


class Writer:
    """Writes one event after another in a thread, up to a limit that can be raised."""

    def __init__(self, settings: Settings, limit: int, *, accounts: int, pause_s: float) -> None:
        self._settings = settings
        self._limit = limit
        self._accounts = accounts
        self._pause_s = pause_s
        self._is_over = Event()
        self._done: Future[None] | None = None
        self.committed = 0

    def allow(self, limit: int) -> None:
        """Let it go on until so many commits."""
        self._limit = limit

    def wait_committed(self, commits: int) -> None:
        """Wait until so many transactions are committed. Raises the writer's error if it has failed."""
        wait_for(
            f"{commits} commits",
            lambda: self.committed >= commits,
            timeout_s=WRITE_TIMEOUT_S,
            needs=self._require_no_error,
        )

    def start(self, pool: ThreadPoolExecutor) -> None:
        """Write in a thread of the pool until `stop`."""
        self._done = pool.submit(self._write)

    def stop(self) -> None:
        """End after the statement under way. Raises the error by which it has ended."""
        self._is_over.set()
        if self._done is not None:
            self._done.result()

    def _write(self) -> None:
        with closing(connect(self._settings, SourceRole.APP)) as connection, connection.cursor() as cursor:
            connection.autocommit = True
            cursor.execute("SET synchronous_commit = off")  # the load is for the relay, not for the disk
            while not self._is_over.wait(self._pause_s):
                first, end = self.committed, min(self.committed + STATEMENT_COMMITS, self._limit)
                if first < end:
                    cursor.execute(WRITE.format(first=first, last=end - 1, accounts=self._accounts))
                    self.committed = end
                else:
                    self._is_over.wait(POLL_S)

    def _require_no_error(self) -> None:
        if self._done is not None and self._done.done():
            self._done.result()


@contextmanager
def writing(settings: Settings, limit: int, *, accounts: int = ACCOUNTS, pause_s: float = 0.0) -> Iterator[Writer]:
    """A writer at work, which pauses so long between two statements."""
    writer = Writer(settings, limit, accounts=accounts, pause_s=pause_s)
    with ThreadPoolExecutor(1) as pool:
        writer.start(pool)
        try:
            yield writer
        finally:
            writer.stop()


def write(settings: Settings, events: int, *, accounts: int = ACCOUNTS) -> None:
    """Write so many events, and return once they are committed."""
    with writing(settings, events, accounts=accounts) as writer:
        writer.wait_committed(events)
