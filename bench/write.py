"""The write transaction: what its outbox costs, as a function and over HTTP, beside a dual write and beside pgbench."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import time
from contextlib import closing
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple

from outbox.base.database import connect
from outbox.base.settings import Settings, SourceRole
from outbox_lab.stack.postgres import Postgres

from bench.clients import Client, Load
from bench.meter import cpu_s

ACCOUNTS = {"uniform": 1_000, "hot": 2}  # with two, every transfer waits for the one before it
SCRIPT = Path(__file__).with_name("transfer.sql")
START_TIMEOUT_S = 300.0
ACCOUNTS_MADE = """
INSERT INTO accounts (id, kind, currency)
SELECT lpad(to_hex(number), 32, '0')::uuid, 'system', 'EUR' FROM generate_series(1, %s) AS number
ON CONFLICT DO NOTHING
"""


class Written(NamedTuple):
    """The joint result of all clients."""

    per_s: float
    database_cpu_s_per_1000: float


def make_accounts(settings: Settings) -> None:
    """Make the accounts 1 to 1,000, whose balances may fall below zero."""
    with closing(connect(settings, SourceRole.APP)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(ACCOUNTS_MADE, [max(ACCOUNTS.values())])


def measure(load: Load, client: Client) -> Written:
    """Run a process for each client."""
    context = multiprocessing.get_context("spawn")
    barrier, counts = context.Barrier(load.clients + 1), context.Queue()
    processes = [
        context.Process(target=_run, args=(load, client, barrier, counts), daemon=True) for _ in range(load.clients)
    ]
    for process in processes:
        process.start()
    barrier.wait(START_TIMEOUT_S)
    before_s = _database_cpu_s(load.settings)
    total = sum(counts.get(timeout=START_TIMEOUT_S + load.duration_s) for _ in processes)
    used_s = _database_cpu_s(load.settings) - before_s
    for process in processes:
        process.join()
    return Written(total / load.duration_s, 1000 * used_s / total)


def _run(load: Load, client: Client, barrier: Barrier, counts: Queue[int]) -> None:
    with client(load) as make:
        barrier.wait(START_TIMEOUT_S)
        until_s, count = time.monotonic() + load.duration_s, 0
        while time.monotonic() < until_s:
            make()
            count += 1
    counts.put(count)


def pgbench(load: Load) -> Written:
    """Let pgbench send the same statements."""
    dsn = load.settings.dsn(SourceRole.APP)
    names = {"PGHOST": "host", "PGPORT": "port", "PGUSER": "user", "PGPASSWORD": "password", "PGDATABASE": "dbname"}
    options = {
        "--client": load.clients,
        "--jobs": min(load.clients, 2),
        "--time": round(load.duration_s),
        "--define": f"accounts={load.accounts}",
        "--file": SCRIPT,
    }
    before_s = _database_cpu_s(load.settings)
    done = subprocess.run(
        [
            Postgres(load.settings).program("pgbench"),
            "--no-vacuum",
            *(f"{name}={one}" for name, one in options.items()),
        ],
        env={variable: str(dsn[name]) for variable, name in names.items()},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    used_s = _database_cpu_s(load.settings) - before_s
    [per_s] = re.findall(r"tps = ([\d.]+)", done.stdout)
    [count] = re.findall(r"actually processed: (\d+)", done.stdout)
    return Written(float(per_s), 1000 * used_s / int(count))


def _database_cpu_s(settings: Settings) -> float:
    return cpu_s(Postgres(settings).processes())
