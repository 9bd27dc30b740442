"""Releases of one shop: projects in folders of their own, each with the events and sinks that it declares.

The shop weighs and labels crates. Its service is the writer in this process, which works for the release that
`Shop.deploy` chose; commands and sinks are processes that each work for the release that a test gives them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from psycopg2 import extensions

from outbox.base import project
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.dbapi import append
from outbox.writing.event import Event
from outbox_lab.testing.command import outbox
from outbox_lab.testing.helpers import query
from tests.support.declared import Events
from tests.support.outbox_rows import Writer, at_work
from tests.support.sink_driver import Database
from tests.support.sink_process import TIMEOUT_S, sink_arguments, within
from tests.support.suite import DOMAIN
from tests.support.topic_reader import delete_topics, relayed
from tests.support.warm_jvm import WarmJvm, WarmSink

AGGREGATE = "crate"
OF_DOMAIN = ("source-database", "sink-database", "connect", "migrations")
KEYS = 30
PAUSE_S = 0.03  # between transactions
NUMBER = {"type": "integer", "minimum": 1, "maximum": 2**31}
UUID = {"type": "string", "format": "uuid", "maxLength": 36, "pattern": "^[0-9a-f-]{36}$"}
IDENTIFIED = {"crate_id": UUID, "version": NUMBER}


def schema(**properties: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an event that requires all its properties."""
    every = {**IDENTIFIED, **properties}
    return {"type": "object", "required": list(every), "properties": every}


WEIGHED_1 = schema(grams=NUMBER)
WEIGHED_2 = schema(grams=NUMBER, scale={"type": "string", "maxLength": 20})
LABELLED = schema(label={"type": "string", "maxLength": 20})
OLD_SCALE = "floor"  # of what was weighed before events said so
TOML = 'key = "crate_id"\nversion = "version"\npartitions = 2\nsource = "source_crates"\n'
UPCAST = f'def weighed_v1(payload):\n    return {{**payload, "scale": "{OLD_SCALE}"}}\n'
JOB = """
from outbox.sinks import SinkJob

job = SinkJob(name={name!r}, events={events!r})
"""
PROJECTION = """
-- ordered
INSERT INTO trail (sink, crate_id, version, grams, scale, release)
SELECT %(sink)s, crate_id, version, coalesce(grams, 0), {scale}, '{release}'
  FROM new_events
 ORDER BY crate_id, version;
"""
GRAMS = """
-- adds: grams of crate.weighed
-- [source]
SELECT key, grams AS total FROM source_crates
-- [sink]
SELECT sink, crate_id::text AS key, sum(grams) AS total, max(version) AS version FROM trail GROUP BY sink, crate_id
"""
SOURCE = """
CREATE TABLE crates (id uuid PRIMARY KEY, version bigint NOT NULL, grams bigint NOT NULL);
CREATE VIEW source_crates AS SELECT id::text AS key, version, grams FROM crates;
GRANT SELECT, INSERT, UPDATE ON crates TO {app};
GRANT SELECT ON source_crates TO {auditor};
"""
SINK = """
CREATE TABLE trail (
    line bigserial, sink text, crate_id uuid, version bigint, grams numeric, scale text, release text
);
GRANT SELECT, INSERT ON trail TO {writer};
GRANT USAGE ON SEQUENCE trail_line_seq TO {writer};
GRANT SELECT ON trail TO {auditor};
"""
CHANGE = """
INSERT INTO crates AS stored (id, version, grams) VALUES (%s, %s, %s)
ON CONFLICT (id) DO UPDATE SET version = excluded.version, grams = stored.grams + excluded.grams
"""
WRITTEN = """
SELECT key, array_agg(version ORDER BY version)
  FROM (SELECT aggregateid AS key, (payload ->> 'version')::bigint AS version
          FROM outbox WHERE aggregatetype = %s AND (type = ANY(%s) OR %s)) AS written
 GROUP BY key
"""
KINDS: dict[str, dict[str, Any]] = {
    "weighed.v1": {"grams": 5},
    "weighed.v2": {"grams": 7, "scale": "belt"},
    "labelled.v1": {"label": "fragile"},
}


@dataclass(frozen=True)
class Release:
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    def declare(self, **schemas: Mapping[str, Any]) -> None:
        Events(self.folder / "events").aggregate(AGGREGATE, TOML, **schemas)

    def ask(self, sink: str, *events: str, has_scale: bool = False, is_compared: bool = True) -> None:
        home = self.folder / "shop_sinks" / sink
        scale = "scale" if has_scale else "NULL"
        write(home / "__init__.py", "")
        write(home / "job.py", JOB.format(name=sink, events=events))
        write(home / "projections" / "trail.sql", PROJECTION.format(scale=scale, release=self.name))
        if is_compared:
            write(home / "comparisons" / "grams.sql", GRAMS)


class Crates(Writer):
    """A service that never stops weighing crates: the change and its events in one transaction."""

    def __init__(self, settings: Settings, seed: int) -> None:
        super().__init__(settings, seed, PAUSE_S, KEYS)
        self.kinds: Callable[[int], Sequence[str]] = lambda _: ["weighed.v1"]
        """Which events there are of a crate, by its number."""

    def write(self, connection: extensions.connection) -> int:
        events = [self._event() for _ in range(self.random.randint(1, 10))]
        commit(connection, *events)
        return len(events)

    def _event(self) -> Event:
        number = self.random.randrange(KEYS)
        kind = self.random.choice(self.kinds(number))
        return event_of(kind, self.keys[number], self.next_version(self.keys[number]))


class ReleasedSink(WarmSink):
    """The sinks of a release, in the JVM that the runs of a home folder share."""

    def __init__(self, release: Release, settings: Settings, *names: str) -> None:
        super().__init__(f"sink-{settings.topic_prefix}", settings, sink_arguments(*names))
        self._release = release

    def env(self) -> Mapping[str, str]:
        return {**super().env(), project.VARIABLE: str(self._release.folder)}


@dataclass
class Shop:
    """Source, topic and sinks of the shop, and its releases."""

    settings: Settings
    folder: Path
    releases: dict[str, Release] = field(default_factory=dict)

    @property
    def topic(self) -> str:
        return f"{self.settings.topic_prefix}.{AGGREGATE}"

    def release(self, name: str, **schemas: Mapping[str, Any]) -> Release:
        """Make a release that declares these events; its sinks are to be declared yet."""
        made = Release(self.folder / name)
        domain = project.load(DOMAIN)
        names = {name: getattr(domain, name.replace("-", "_")) for name in OF_DOMAIN}
        names |= {"events": "events", "sinks-package": "shop_sinks"}
        lines = [f"{name} = {json.dumps(str(value))}" for name, value in names.items()]
        write(made.folder / "pyproject.toml", "\n".join(["[tool.outbox]", *lines, ""]))
        write(made.folder / "shop_sinks" / "__init__.py", "")
        made.declare(**schemas)
        if {"weighed_v1", "weighed_v2"} <= schemas.keys():
            write(made.folder / "events" / AGGREGATE / "upcast.py", UPCAST)
        self.releases[name] = made
        return made

    def deploy(self, release: Release) -> None:
        """Let the service work for a release."""
        os.environ[project.VARIABLE] = str(release.folder)

    def write(self, *events: Event) -> None:
        """Let the service write events, in one transaction."""
        with closing(connect(self.settings, SourceRole.APP)) as connection:
            commit(connection, *events)

    def run(self, release: Release, *words: str) -> CompletedProcess[str]:
        """Run a command of a release to its end."""
        variables = {**self.settings.as_env(), project.VARIABLE: str(release.folder)}
        done = outbox(*words, home=self.settings.home, **variables)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def succeed(self, release: Release, *words: str) -> str:
        """Output of a command that succeeds."""
        done = self.run(release, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def catch_up(self, release: Release, *sinks: str) -> CompletedProcess[str]:
        """Let sinks of a release apply all that their topics have."""
        of_release = {project.VARIABLE: str(release.folder)}
        return WarmJvm(self.settings).run(self.settings, *sink_arguments(*sinks), "--until-caught-up", **of_release)

    def finish(self, release: Release, *sinks: str) -> None:
        """Catch up once all events of the outbox are on the topic."""
        relayed(self.settings, timeout_s=TIMEOUT_S)
        done = self.catch_up(release, *sinks)
        assert done.returncode == 0, done.stderr

    def check(self, release: Release) -> dict[str, Any]:
        done = self.run(release, "check", "--json")
        report: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (1 if report["findings"] else 0), done.stderr
        return report

    def running(self, release: Release, *sinks: str) -> AbstractContextManager[ReleasedSink]:
        """Sinks of a release that run until the end of the block."""
        sink = ReleasedSink(release, self.settings, *sinks)
        return within(sink, sink.stop)

    @contextmanager
    def writing(self, seed: int) -> Iterator[Crates]:
        """A service at work, which never stops."""
        with at_work(Crates(self.settings, seed)) as writer:
            yield writer
            assert writer.is_alive(), "the service has never stopped"
        assert writer.interruptions == 0

    def wait_more(self, sink: ReleasedSink, *names: str, count: int = 100) -> None:
        """Wait until each of these sinks has applied so many more events."""
        due = {name: Database(self.settings, name).applied() + count for name in names}

        def applied() -> bool:
            assert sink.is_running(), sink.tail()
            return all(Database(self.settings, name).applied() >= number for name, number in due.items())

        wait_for(f"{count} more events applied", applied, timeout_s=TIMEOUT_S)

    def written(self, *types: str) -> dict[str, list[int]]:
        """The versions of each crate's events in the outbox, of all types or of some."""
        return dict(query(self.settings, WRITTEN, parameters=[AGGREGATE, list(types), not types]))

    def trail(self, sink: str) -> dict[str, list[int]]:
        """The versions of each crate's events in the order in which a sink has applied them."""
        sql = "SELECT crate_id::text, array_agg(version ORDER BY line) FROM trail WHERE sink = %s GROUP BY crate_id"
        return dict(query(self.settings, sql, SinkRole.OWNER, [sink]))

    def reasons(self, sink: str, status: str = "open") -> dict[str, int]:
        """How many dead letters a sink has, by reason."""
        sql = "SELECT reason, count(*) FROM dead_letters WHERE sink = %s AND status = %s GROUP BY reason"
        return dict(query(self.settings, sql, SinkRole.OWNER, [sink, status]))


def commit(connection: extensions.connection, *events: Event) -> None:
    """The changes of crates and their events, as the service commits them."""
    with connection, connection.cursor() as cursor:
        for event in events:
            payload = event.payload
            cursor.execute(CHANGE, [event.aggregateid, payload["version"], payload.get("grams", 0)])
        append(connection, *events)


def event_of(kind: str, key: str, version: int) -> Event:
    type_, _, schema_version = kind.rpartition(".v")
    payload = {"crate_id": key, "version": version, **KINDS[kind]}
    return Event(AGGREGATE, key, type_, payload, int(schema_version))


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def codes(report: Mapping[str, Any]) -> list[str]:
    return [finding["code"] for finding in report["findings"]]


@contextmanager
def opened(topic: Settings, folder: Path) -> Iterator[Shop]:
    """The shop on databases and a broker; a test makes its releases. Its connector and topic go at the end."""
    shop = Shop(topic, folder)
    create(topic, SourceRole.OWNER, SOURCE)
    create(topic, SinkRole.OWNER, SINK)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(project.VARIABLE, os.environ[project.VARIABLE])  # restored at the end
        yield shop
        newest = list(shop.releases.values())[-1]
        shop.succeed(newest, "connect", "remove", "--drop-slot", "--yes")
    delete_topics(topic, shop.topic)


def create(settings: Settings, owner: SourceRole | SinkRole, statements: str) -> None:
    query(settings, statements.format(**{role.value: settings.role_name(role) for role in type(owner)}), owner)
