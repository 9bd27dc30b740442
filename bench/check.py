"""`outbox check` of a large topic: its time and its memory."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import NamedTuple

import psutil
from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import DOTENV, Settings, SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.relay import lifecycle
from outbox_lab.stack.stack import Stack
from psycopg2.extras import execute_values

from bench import backlog, relay
from bench.event import topic

SINK = "balances"
MEMORY_EVERY_S = 0.2
ACCOUNTS = "INSERT INTO accounts (id, kind, currency, balance_minor, version) VALUES %s"
BALANCES = "INSERT INTO balances (sink, account_id, currency, balance_minor, version, events) VALUES %s"
POSITIONS = """
INSERT INTO positions (sink, topic, topic_id, partition, next_offset) VALUES %s
    ON CONFLICT (sink, topic, partition) DO UPDATE SET next_offset = excluded.next_offset
"""
TOTALS = "SELECT aggregateid, count(*), max((payload ->> 'version')::bigint) FROM outbox GROUP BY aggregateid"


class Checked(NamedTuple):
    """One run of `outbox check`."""

    records: int
    s: float
    cpu_s_per_million: float
    memory_max_mib: int


def fill(settings: Settings, events: int, report: Callable[[str], None]) -> None:
    """Put events on the topic that were pruned from the outbox, and that the sink has applied."""
    _store_totals(settings, [(key, count, count) for key, count in backlog.produce(settings, events, report).items()])


def relay_more(settings: Settings, events: int) -> None:
    """Relay more events, which stay in the outbox, and which the sink has applied."""
    lifecycle.apply(settings)
    end = relay.offsets(settings) + events
    relay.write(settings, events)
    needs = Stack(settings).part("connect").require_running
    wait_for("the relay", lambda: relay.offsets(settings) >= end, timeout_s=relay.RELAY_TIMEOUT_S, needs=needs)
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection.cursor() as cursor:
        cursor.execute(TOTALS)
        _store_totals(settings, cursor.fetchall())


def _store_totals(settings: Settings, totals: Sequence[tuple[str, int, int]]) -> None:
    """Let the source have these totals and versions by key, and the sink have applied all of the topic."""
    topic_id = topics.describe(settings, topic(settings)).id
    ends = topics.last_stable_offsets(settings, topic(settings))
    with closing(connect(settings, SourceRole.OWNER)) as source, source, source.cursor() as cursor:
        execute_values(cursor, ACCOUNTS, [(key, "user", "EUR", *state) for key, *state in totals])
    with closing(connect(settings, SinkRole.OWNER)) as sink, sink, sink.cursor() as cursor:
        cursor.execute("INSERT INTO sinks (name, epoch) VALUES (%s, 1) ON CONFLICT DO NOTHING", [SINK])
        execute_values(cursor, BALANCES, [(SINK, key, "EUR", *state, 0) for key, *state in totals])
        execute_values(cursor, POSITIONS, [(SINK, topic(settings), topic_id, *place) for place in ends.items()])


def check(settings: Settings, *options: str) -> Checked:
    """Run `outbox check`. Raises Failure if it finds a problem."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "outbox", "check", "--json", *options]
    environment = {**os.environ, **settings.as_env(), DOTENV: os.devnull}
    with tempfile.TemporaryFile() as printed:
        process = psutil.Popen(command, env=environment, stdout=printed)
        memory_max, ended = 0, 0
        while not ended:
            memory_max = max(memory_max, _memory(process))
            time.sleep(MEMORY_EVERY_S)
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        printed.seek(0)
        found: Mapping[str, int] = json.loads(printed.read() or b"{}").get("total", {})
    if status:
        raise Failure("outbox check has failed", "its message is above", code="check-failed")
    records = found["records"]
    return Checked(
        records=records,
        s=time.monotonic() - began_s,
        cpu_s_per_million=(usage.ru_utime + usage.ru_stime) / records * 1e6,
        memory_max_mib=memory_max // 2**20,
    )


def _memory(process: psutil.Process) -> int:
    """Bytes of a process and its children. What they share counts for each."""
    total = 0
    with suppress(psutil.Error):
        for one in (process, *process.children(recursive=True)):
            total += one.memory_info().rss
    return total
