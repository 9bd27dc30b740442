"""Postgres gets a newer major version: by dump and restore, by `pg_upgrade`, and by a server that follows the old one.

In each of them the log of the new server has other positions than the offset that Connect has stored, or no slot.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from outbox.base.settings import Role, Settings, SinkRole, SourceRole, password_setting
from outbox.migrations.migrate import MINIMUM, migrate
from outbox.relay import lifecycle
from outbox_lab.soak.proxy import Proxy
from outbox_lab.stack.postgres import MAJOR
from outbox_lab.testing.command import run
from outbox_lab.testing.fixtures.stack import private_stack
from outbox_lab.testing.helpers import query
from outbox_lab.testing.homes import Homes
from tests.stock import Client
from tests.support import servers, slots
from tests.support.made_events import nth_key
from tests.support.outbox_rows import ids
from tests.support.rehearsal import Rehearsal, client_of
from tests.support.servers import Server
from tests.support.sink_driver import Database
from tests.support.topic_reader import duplicates, read, relayed

SOURCE, SINKS = "The service's Postgres gets a newer major version", "The sinks' Postgres gets a newer major version"
BEFORE, AFTER = slice(2), slice(2, None)  # the commands of the entry: on the old server, and on the new one


@dataclass
class Chain:
    """A chain whose server is to be replaced, by another one behind the same address."""

    topic: Settings
    old: Server
    new: Server
    one: Rehearsal
    address: Proxy

    def switch(self) -> None:
        """Stop the old server, start the new one unless it runs, and let the address lead there."""
        self.old.stop()
        self.new.start()
        self.address.target_port = self.new.port


@contextmanager
def upgraded(topic: Settings, homes: Homes, version: int, *, sinks: bool = False) -> Iterator[Chain]:
    """A chain on a server of an older version that has relayed and applied two events."""
    old, new = Server(topic, homes, version, sinks=sinks), Server(topic, homes, sinks=sinks)
    try:
        old.start()
        migrate(old.settings)
        with servers.address_of(topic, old) as address:
            settings = servers.moved(topic, address.port, sinks=sinks)
            lifecycle.apply(settings)
            one = Rehearsal(settings, client_of(settings), SOURCE)
            one.working(1, 2)
            yield Chain(topic, old, new, one, address)
            lifecycle.remove(settings, drop_slot=True)
    finally:
        old.kill()
        new.kill()


def finished(chain: Chain, moved: int) -> None:
    """The entry's commands on the new server; then the chain is sound and has relayed each event once."""
    one = chain.one
    one.diagnosed()
    one.follow(AFTER)
    one.sound(7, 8)
    assert duplicates(read(one.settings)) == 0
    assert Database(one.settings).applied() == moved + 2


def test_dump_and_restore(topic: Settings, homes: Homes) -> None:
    """Of both databases, from the oldest version."""
    with upgraded(topic, homes, 15, sinks=True) as chain:
        one = chain.one
        one.move(3, 4)
        relayed(one.settings)  # and not applied
        one.follow(BEFORE)
        assert ids(one.settings) == [], "so the snapshot on the new server sends nothing twice"
        chain.new.start()
        servers.dump(chain.old, chain.new)
        chain.switch()
        sinks = Rehearsal(one.settings, one.client, SINKS)
        sinks.follow()
        assert Database(one.settings).applied() == 4
        finished(chain, 4)


@pytest.mark.recovery
@pytest.mark.parametrize("version", [17, 18])
def test_pg_upgrade_that_keeps_the_slot(topic: Settings, homes: Homes, version: int) -> None:
    """`pg_upgrade` wants it read to its end. It begins after the stored offset then, which `connect apply` refuses."""
    with upgraded(topic, homes, version) as chain:
        one = chain.one
        one.move(3, 4)
        relayed(one.settings)
        lifecycle.remove(one.settings)
        slots.wait_released(one.settings)
        chain.old.stop()
        done = servers.pg_upgrade(chain.old, chain.new)
        assert done.returncode == 1
        assert "logical replication slots that cannot be upgraded" in done.stdout
        chain.old.start()
        slots.advance(one.settings)
        chain.old.stop()
        done = servers.pg_upgrade(chain.old, chain.new)
        assert done.returncode == 0, done.stdout
        chain.switch()
        assert slots.existing(one.settings).active_pid is None
        assert "no event is missing" in one.run("connect", "apply", status=1).stderr
        one.run("connect", "remove", "--drop-slot")
        one.run("connect", "apply")
        one.sound(7, 8)
        assert duplicates(read(one.settings)) == 4, "the outbox was not pruned before"
        assert Database(one.settings).applied() == 4 + 2, "nothing was applied twice"


@pytest.mark.recovery
def test_switch_to_a_server_that_follows(topic: Settings, homes: Homes) -> None:
    """Logical replication copies the tables while the service goes on. Slots and positions of the log stay behind."""
    with upgraded(topic, homes, 15) as chain:
        one = chain.one
        chain.new.start()
        servers.follow(chain.old, chain.new)
        one.move(3, 4)
        relayed(one.settings)
        one.follow(BEFORE)
        servers.leave(chain.old, chain.new)
        chain.switch()
        finished(chain, 4)


# Source and sink on servers of different versions -----------------------------------------------------------------


STRATEGIES = ["dedup", "versions", "merge"]
VERSION = "SELECT current_setting('server_version_num')::int / 10000"


@pytest.fixture(scope="module")
def another(homes: Homes, template: Settings) -> Iterator[Settings]:
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
def mixed(chain: Settings, another: Settings) -> Settings:
    """The chain, with the sink database on the other server."""
    names = ["sink_db_url", *map(password_setting, SinkRole)]
    return chain.replace(**{name: getattr(another, name) for name in names})


def test_source_and_sink_are_on_servers_of_different_versions(mixed: Settings, client: Client) -> None:
    assert version(mixed) != version(mixed, SinkRole.AUDITOR)
    for number in range(30):
        assert client.move(nth_key(number % 3), 1 + number).status_code == 201
    run(mixed, "check", "--wait", "60")
    run(mixed, "sink", *STRATEGIES, "--until-caught-up")
    for _ in range(2):
        sinks = json.loads(run(mixed, "check", "--json"))["sinks"]
        drifts = {sink["name"]: one["drift"] for sink in sinks for one in sink["comparisons"]}
        assert drifts == {sink: {} for sink in STRATEGIES}
        run(mixed, "rebuild", "dedup", "--from", "source", "--yes")
