"""Many types of events in a project made for one benchmark: eight types of two aggregates, and one type beside them."""

from __future__ import annotations

import json
import os
import random
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from confluent_kafka import Producer
from outbox.base import project
from outbox.base.settings import Settings
from outbox.kafka.clients import client_config

from bench import backlog
from bench.event import uuid7

KEYS = 1_000
ONE = ["single.made"]
EIGHT = [f"{aggregate}.kind{number}" for aggregate in ("left", "right") for number in range(4)]
SINKS = {"eight": EIGHT, "one": ONE}
APPLIED = "SELECT coalesce(sum(next_offset), 0) FROM positions WHERE sink = %s"

PYPROJECT = """[tool.outbox]
source-database = "kinds_source"
sink-database = "kinds_sink"
topic-prefix = "kinds"
connect = "{connect}"
events = "events"
sinks-package = "kinds_sinks"
"""
JOB = '''"""One sink of one type, one of eight."""

from pathlib import Path

from outbox.sinks import SinkJob

jobs = [
    SinkJob(name="one", events=["single"], projections=Path("one")),
    SinkJob(name="eight", events=["left", "right"], projections=Path("eight")),
]
'''
PROJECTION = """
INSERT INTO totals AS stored (sink, key, total, version, events)
SELECT %(sink)s, key, sum(amount), max(version), count(*) FROM ({events}) AS new GROUP BY key ORDER BY key
ON CONFLICT (sink, key) DO UPDATE
   SET total = stored.total + excluded.total,
       version = greatest(stored.version, excluded.version),
       events = stored.events + excluded.events;
"""
MIGRATION = '''"""The totals of each key."""

from outbox.migrations import execute, role

revision = "sink_domain_0001"
down_revision = None
branch_labels = ("domain",)
depends_on = ("sink_machinery_0001",)


def upgrade() -> None:
    execute("""
        CREATE TABLE totals (
            sink text, key uuid, total numeric, version bigint, events bigint, PRIMARY KEY (sink, key)
        ) WITH (fillfactor = 70)
    """)
    execute(f"GRANT SELECT, INSERT, UPDATE ON totals TO {role('writer')}")
'''
UUID_RULE = {"type": "string", "format": "uuid", "maxLength": 36}
BIGINT_RULE = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
COMMON = {
    "key": UUID_RULE,
    "amount": BIGINT_RULE,
    "version": BIGINT_RULE,
    "occurred_at": {"type": "string", "format": "date-time", "maxLength": 27},
}


@contextmanager
def project_in(folder: Path) -> Iterator[None]:
    """The project of this process, and of those that it starts, is a new one in a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    _write(folder / "pyproject.toml", PYPROJECT.format(connect=project.current().connect))
    for event in (*ONE, *EIGHT):
        _declare(folder / "events", event)
    _write(folder / "kinds_sinks" / "__init__.py", "")
    _write(folder / "kinds_sinks" / "totals" / "__init__.py", "")
    _write(folder / "kinds_sinks" / "totals" / "job.py", JOB)
    for name, events in SINKS.items():
        of_each = " UNION ALL ".join(
            f"SELECT key, amount, version FROM new_{_word(event)}"  # noqa: S608
            for event in events
        )
        _write(folder / "kinds_sinks" / "totals" / name / "totals.sql", PROJECTION.format(events=of_each))
    _write(folder / "migrations" / "sink" / "0001_totals.py", MIGRATION)
    (folder / "migrations" / "source").mkdir()
    before = os.environ.get(project.VARIABLE)
    os.environ[project.VARIABLE] = str(folder)
    project.make_importable()
    try:
        yield
    finally:
        os.environ.pop(project.VARIABLE)
        if before is not None:
            os.environ[project.VARIABLE] = before


def produce(settings: Settings, events: Sequence[str], count: int, report: Callable[[str], None]) -> None:
    """Put so many events on their topics, of each type as many, as fast as a client can."""
    producer = Producer({**client_config(settings), "linger.ms": 50, "compression.type": "lz4"})
    keys, versions = [str(uuid.uuid4()) for _ in range(KEYS)], defaultdict[tuple[str, str], int](int)
    for number in range(count):
        event, key = events[number % len(events)], random.choice(keys)
        aggregate, _, type_ = event.partition(".")
        versions[aggregate, key] += 1
        headers: dict[str, str | bytes | None] = {"id": str(uuid7()), "eventType": type_, "schemaVersion": "1"}
        payload = json.dumps(_payload(event, key, versions[aggregate, key]))
        backlog.send(producer, f"{settings.topic_prefix}.{aggregate}", payload, key, headers)
        if number % 250_000 == 0:
            report(f"produced {number}")
    producer.flush()


def applied(settings: Settings, name: str) -> AbstractContextManager[Callable[[], int]]:
    """A function that says how many events a sink has applied."""
    return backlog.counted(settings, APPLIED, name)


def empty(settings: Settings) -> None:
    """Let every drain begin with the same."""
    backlog.empty(settings, "totals")


def _payload(event: str, key: str, version: int) -> dict[str, object]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    own = {f"{_word(event)}_id": str(uuid.uuid4()), f"{_word(event)}_count": version, f"{_word(event)}_unit": "EUR"}
    return {"key": key, "amount": 1, "version": version, "occurred_at": now, **own}


def _declare(folder: Path, event: str) -> None:
    aggregate, _, type_ = event.partition(".")
    word = _word(event)
    own = {f"{word}_id": UUID_RULE, f"{word}_count": BIGINT_RULE, f"{word}_unit": {"type": "string", "maxLength": 3}}
    schema = {"type": "object", "required": [*COMMON, *own], "properties": {**COMMON, **own}}
    _write(folder / aggregate / f"{type_}.v1.schema.json", json.dumps(schema))
    _write(folder / aggregate / "aggregate.toml", 'key = "key"\nversion = "version"\n')


def _word(event: str) -> str:
    return event.replace(".", "_")


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
