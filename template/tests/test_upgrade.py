"""A running project of the time of one topic and one schema is upgraded as docs/updating.md says in "From one event to
many": nothing is lost and nothing counts twice.

The project is made from the template's last commit of that time, and runs its own code until it is updated, with the
packages of that time: Spark's checkpoints are an older Spark's.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from template.tests import bake
from template.tests.bake import Template
from template.tests.test_update import edit, updated

pytestmark = [pytest.mark.copies, pytest.mark.timeout(1800)]

BEFORE = "a3227078573cef1f896919ee77d7c83d1afc0dbf"
TOPIC = "stock-room.events"
AHEAD, *DEPOTS = (str(uuid.uuid5(uuid.NAMESPACE_URL, str(number))) for number in range(4))

# Both run in the project, on the code that it has at that time.
ARRIVE = """
import json, sys, uuid
from outbox.base import settings
from service.app import create_app

token = settings.load().service_token.get_secret_value()
client = create_app().test_client()
for depot, count in json.loads(sys.argv[1]):
    headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": str(uuid.uuid4())}
    answer = client.post("/parcels", json={"depot_id": depot, "count": count}, headers=headers)
    assert answer.status_code == 201, answer.text
"""
QUERY = """
import json, sys
from contextlib import closing
from outbox.base import settings
from outbox.base.database import connect
from outbox.base.settings import SinkRole, SourceRole

role, query = sys.argv[1:]
roles = {"source": SourceRole.OWNER, "sink": SinkRole.OWNER}
with closing(connect(settings.load(), roles[role])) as connection, connection.cursor() as cursor:
    cursor.execute(query)
    print(json.dumps(cursor.fetchall()))
"""
# An arrival as a newer service writes it, which was deployed before the sinks.
ARRIVE_AHEAD = """
import sys, uuid
from outbox.base import settings
from outbox.http.database import make_engine
from outbox.writing.append import Event, append
from service.app import ADD

depot, count = sys.argv[1], int(sys.argv[2])
with make_engine(settings.load()).begin() as connection:
    parcels, version = connection.execute(ADD, {"depot_id": depot, "count": count}).one()
    payload = {"arrival_id": str(uuid.uuid4()), "depot_id": depot, "count": count, "parcels_after": parcels,
               "version": version, "occurred_at": "2026-11-24T01:02:03.456789Z", "carrier": "by rail"}
    append(connection, Event("depot", depot, "parcels.arrived", payload, schema_version=2))
"""

AGGREGATE = f"""
key = "depot_id"
version = "version"
topic = "{TOPIC}"
source = "source_totals"
"""
UPCAST = """
from typing import Any


def parcels_arrived_v1(payload: dict[str, Any]) -> dict[str, Any]:
    return {**payload, "carrier": "unknown"}
"""
JOB = """
from outbox.sinks import SinkJob

job = SinkJob(name="dedup", events=["depot"])
"""
COMPARISON = """
-- adds: count
-- [source]
SELECT key, total FROM source_totals
-- [sink]
SELECT sink, key, total, version FROM sink_totals
"""


class Project:
    """The project of an owner, with a stack of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.interpreter = bake.installed(folder)
        self.arrivals = 0

    def python(self, *words: str) -> str:
        """What Python has printed; it must succeed."""
        return bake.python(self.folder, *words, interpreter=self.interpreter)

    def outbox(self, *words: str) -> str:
        """What a command has printed; it must succeed."""
        return self.python("-m", "outbox", *words)

    def arrive(self, *arrivals: tuple[str, int]) -> None:
        """Send arrivals to the service."""
        self.python("-c", ARRIVE, json.dumps(arrivals))
        self.arrivals += len(arrivals)

    def arrive_ahead(self, depot: str, count: int) -> None:
        """Write an arrival of a version that nobody knows yet."""
        self.python("-c", ARRIVE_AHEAD, depot, str(count))
        self.arrivals += 1

    def query(self, database: str, query: str) -> list[list[Any]]:
        """The rows of a query in one of its databases."""
        rows: list[list[Any]] = json.loads(self.python("-c", QUERY, database, query))
        return rows

    def letters(self) -> Counter[tuple[str, str]]:
        """How many dead letters it has, by status and reason."""
        listed = self.outbox("dead-letters", "list", "--status", "all", "--json").splitlines()
        return Counter((letter["status"], letter["reason"]) for letter in map(json.loads, listed))


@pytest.fixture
def template(tmp_path: Path) -> Template:
    """The template of that time."""
    if not bake.has(BEFORE):
        reason = f"this clone lacks commit {BEFORE[:7]}: `git fetch --unshallow` brings the history"
        if "CI" in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)
    return Template(tmp_path / "template", BEFORE)


@pytest.fixture
def project(template: Template, tmp_path: Path) -> Iterator[Project]:
    """A project made from it, running. Its projection takes the events of a key in order."""
    folder = template.made(tmp_path / "stock room", project_name="stock-room", sample="minimal", demo=False)
    projection = folder / "sinks/depots/projections/depots.sql"
    projection.write_text(f"-- ordered\n{projection.read_text()}")
    bake.git(folder, "init", "--quiet")
    bake.commit(folder, "begin")
    made = Project(folder)
    try:
        made.outbox("up")
        made.outbox("migrate")
        made.outbox("connect", "apply")
        yield made
    finally:
        made.outbox("down")


def write(file: Path, text: str) -> None:
    """Write a file of the owner, in folders that may be new."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text.lstrip("\n"))


def declare_the_events(folder: Path) -> None:
    """The one schema becomes that of the one event, and the version that came too early is declared beside it."""
    events = folder / "connect" / "events"
    schema = json.loads((events / "parcels-event.v1.schema.json").read_text())
    (events / "parcels-event.v1.schema.json").unlink()
    del schema["$defs"]["headers"]
    write(events / "depot" / "parcels.arrived.v1.schema.json", json.dumps(schema, indent=2))
    schema["properties"]["carrier"] = {"type": "string", "minLength": 1}
    schema["required"].append("carrier")
    write(events / "depot" / "parcels.arrived.v2.schema.json", json.dumps(schema, indent=2))
    write(events / "depot" / "upcast.py", UPCAST)
    write(events / "depot" / "aggregate.toml", AGGREGATE)


def do_what_the_page_says(folder: Path) -> None:
    """The steps of the owner, behind `make update`."""
    edit(folder / "pyproject.toml", 'sinks = ["depots"]', 'sinks = ["dedup"]')
    declare_the_events(folder)
    write(folder / "sinks/depots/job.py", JOB)
    write(folder / "sinks/depots/comparisons/totals.sql", COMPARISON)
    bake.commit(folder, "many events")


def test_a_running_project_is_upgraded(template: Template, project: Project) -> None:
    project.arrive(*((depot, count) for count in range(1, 6) for depot in DEPOTS), (AHEAD, 7))
    project.arrive_ahead(AHEAD, 70)
    project.arrive((AHEAD, 700))
    project.outbox("sink", "--strategy", "dedup", "--until-caught-up")
    set_aside = {("open", "unknown schema version"): 1, ("open", "parked"): 1}
    assert project.letters() == set_aside
    project.arrive(*((depot, 10) for depot in DEPOTS))  # no sink has read these

    template.to_the_present()
    updated(template, project.folder)
    project.interpreter = Path(sys.executable)  # with the packages of now, as `make install` would bring them
    do_what_the_page_says(project.folder)
    assert "sink_machinery_0002" in project.outbox("migrate")
    project.outbox("connect", "apply")
    project.arrive(*((depot, 100) for depot in (AHEAD, *DEPOTS)))
    project.outbox("sink", "--until-caught-up")
    assert project.letters() == {**set_aside, ("open", "parked"): 2}
    project.outbox("dead-letters", "replay", "--all")
    assert {status for status, _ in project.letters()} == {"replayed"}

    report = json.loads(project.outbox("check", "--json", "--wait", "60"))
    assert [(one["name"], one["records"], one["duplicates"]) for one in report["topics"]] == [
        (TOPIC, project.arrivals, 0)
    ]
    assert [(one["name"], one["lost"], one["parked"]) for one in report["sinks"]] == [("dedup", 0, 0)]
    assert report["uncompared_tables"] == []
    totals = project.query("source", "SELECT id::text, parcels, version FROM depots ORDER BY id")
    assert dict(zip((row[0] for row in totals), (row[1] for row in totals), strict=True)) == {
        AHEAD: 877,
        **dict.fromkeys(DEPOTS, 125),
    }
    assert project.query("sink", "SELECT depot_id::text, parcels::int, version FROM depot_parcels ORDER BY 1") == totals
    assert project.query("sink", "SELECT count(*) FROM processed_events") == [[project.arrivals]]
    assert "nothing" in project.outbox("rebuild", "dedup", "--from", "source", "--dry-run")
