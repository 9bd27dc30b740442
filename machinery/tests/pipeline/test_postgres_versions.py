"""Source and sink database on servers of different versions. `make test-postgres` runs the rest on an older one."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from outbox.base.settings import Role, Settings, SinkRole, SourceRole, password_setting
from outbox.migrations.migrate import MINIMUM, migrate
from outbox_lab.stack.postgres import MAJOR
from outbox_lab.testing.command import run
from outbox_lab.testing.fixtures.stack import private_stack
from outbox_lab.testing.helpers import query
from outbox_lab.testing.homes import Homes
from tests.stock import Client
from tests.support.made_events import nth_key

SINKS = ["dedup", "versions", "merge"]
VERSION = "SELECT current_setting('server_version_num')::int / 10000"


@pytest.fixture(scope="module")
def other(homes: Homes, template: Settings) -> Iterator[Settings]:
    """Databases on a server of another version than the session's."""
    made = private_stack(homes.new("other"), MAJOR if version(template) == MINIMUM else MINIMUM)
    made.up(only=["postgres"])
    migrate(made.settings)
    yield made.settings
    made.down(gently=False)


def version(settings: Settings, role: Role = SourceRole.AUDITOR) -> int:
    """The major version of a database's server."""
    ((found,),) = query(settings, VERSION, role)
    return int(found)


@pytest.fixture
def mixed(chain: Settings, other: Settings) -> Settings:
    """The chain, with the sink database on the other server."""
    names = ["sink_db_url", *map(password_setting, SinkRole)]
    return chain.replace(**{name: getattr(other, name) for name in names})


def test_source_and_sink_are_on_servers_of_different_versions(mixed: Settings, client: Client) -> None:
    assert version(mixed) != version(mixed, SinkRole.AUDITOR)
    for number in range(30):
        assert client.move(nth_key(number % 3), 1 + number).status_code == 201
    run(mixed, "check", "--wait", "60")
    run(mixed, "sink", *SINKS, "--until-caught-up")
    assert drifts(mixed) == {sink: {} for sink in SINKS}
    run(mixed, "rebuild", "dedup", "--from", "source", "--yes")
    assert drifts(mixed) == {sink: {} for sink in SINKS}


def drifts(settings: Settings) -> dict[str, object]:
    """By sink the keys that differ."""
    sinks = json.loads(run(settings, "check", "--json"))["sinks"]
    return {sink["name"]: one["drift"] for sink in sinks for one in sink["comparisons"]}
