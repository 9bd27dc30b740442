"""What tests of the sinks as processes share: a publisher, sinks that run, and what they have logged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from urllib.parse import unquote, urlparse

from confluent_kafka import Producer

from outbox import topics
from outbox.settings import Settings
from outbox.stack.command import Command
from outbox.wait import wait_for
from tests.sink import Database, Event, account, uuid7

RANDOM = Random(11)  # noqa: S311
TIMEOUT_S = 120


class Publisher:
    """Writes events to the topic as the connector does: in transactions, some of which are aborted."""

    def __init__(self, settings: Settings) -> None:
        self._topic = settings.topic
        config = {"transactional.id": f"test-{settings.topic}", "linger.ms": 5, "log_level": 0}
        self._producer = Producer({**topics.client_config(settings), **config})
        self._producer.init_transactions()
        self._versions: dict[str, int] = {}

    def events(self, count: int, accounts: int = 5) -> list[Event]:
        """Fresh events, in the order of their accounts' versions, all amounts different."""
        return [self._event(account(number % accounts), 1 + RANDOM.randrange(1_000_000)) for number in range(count)]

    def send(self, events: Sequence[Event], *, abort: bool = False) -> None:
        """Publish events in one transaction."""
        self._producer.begin_transaction()
        for event in events:
            self._produce(event.account_id, _value(event), event.event_id)
        self._end(abort)

    def send_raw(self, key: str | None, value: bytes | None, event_id: str | None) -> None:
        """Publish whatever this is."""
        self._producer.begin_transaction()
        self._produce(key, value, event_id)
        self._end(abort=False)

    def _event(self, of_account: str, amount: int) -> Event:
        version = self._versions.get(of_account, 0) + 1
        self._versions[of_account] = version
        return Event(uuid7(RANDOM), of_account, amount, version)

    def _produce(self, key: str | None, value: bytes | None, event_id: str | None) -> None:
        headers: dict[str, str | bytes | None] = {"eventType": "transfer.credited", "schemaVersion": "1"}
        if event_id is not None:
            headers["id"] = event_id
        self._producer.produce(self._topic, key=key, value=value, headers=headers)

    def _end(self, abort: bool) -> None:
        self._producer.flush(10)
        if abort:
            self._producer.abort_transaction(10)
        else:
            self._producer.commit_transaction(10)


def _value(event: Event) -> bytes:
    return json.dumps(
        {
            "transfer_id": event.event_id,
            "account_id": event.account_id,
            "amount": event.amount,
            "currency": event.currency,
            "balance_after": event.balance_after,
            "version": event.version,
            "occurred_at": "2026-11-21T05:00:00Z",
        }
    ).encode()


def catch_up(settings: Settings, *names: str) -> subprocess.CompletedProcess[str]:
    """Run `outbox sink --until-caught-up` to its end."""
    strategies = [word for name in names or ("dedup",) for word in ("--strategy", name)]
    return subprocess.run(
        [sys.executable, "-m", "outbox", "sink", *strategies, "--until-caught-up"],
        env=settings.as_env(),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def told(done: subprocess.CompletedProcess[str], event: str) -> list[dict[str, object]]:
    """The log lines of one kind."""
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def the_failure(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that told the failure."""
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("outbox: ")]
    return line


def checkpoint(settings: Settings, sink: str = "dedup") -> Path:
    return Path(unquote(urlparse(settings.checkpoints).path), sink)


@contextmanager
def running(settings: Settings, *names: str) -> Iterator[Command]:
    """Sinks that run until told otherwise, and surely no longer than the block."""
    strategies = [word for name in names or ("dedup",) for word in ("--strategy", name)]
    sink = Command(f"sink-{settings.topic}", settings, ["sink", *strategies])
    sink.start_timeout_s = TIMEOUT_S
    sink.spawn()
    try:
        yield sink
    except BaseException:
        print(sink.tail(30))  # noqa: T201
        raise
    finally:
        sink.kill()


def wait_applied(sink: Command, database: Database, count: int) -> None:
    """Wait until the sink has applied so many events."""

    def applied() -> bool:
        assert sink.is_running(), sink.tail()
        ((events,),) = database.query("SELECT coalesce(sum(events), 0) FROM balances WHERE sink = %s", database.sink)
        return int(str(events)) >= count

    wait_for(f"{count} events applied", applied, timeout_s=TIMEOUT_S)
