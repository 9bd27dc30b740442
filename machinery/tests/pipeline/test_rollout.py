"""New events and new versions rolled out under load, on the real chain: the sinks first, or the service first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest

from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox_lab.testing.helpers import chosen_seed, query
from tests.support.releases import (
    KEYS,
    LABELLED,
    OLD_SCALE,
    WEIGHED_1,
    WEIGHED_2,
    Crates,
    Release,
    ReleasedSink,
    Shop,
    event_of,
    opened,
)
from tests.support.sink_driver import Database
from tests.support.sink_process import TIMEOUT_S, reported_failure

TRAIL, WEIGHTS = "trail", "weights"  # a sink of the aggregate, and one of single events


@pytest.fixture
def shop(topic: Settings, tmp_path: Path) -> Iterator[Shop]:
    with opened(topic, tmp_path) as made:
        yield made


@pytest.fixture
def old(shop: Shop) -> Release:
    """The release that is deployed everywhere."""
    made = shop.release("old", weighed_v1=WEIGHED_1)
    made.ask(TRAIL, "crate")
    made.ask(WEIGHTS, "crate.weighed")
    shop.succeed(made, "migrate")
    shop.succeed(made, "connect", "apply")
    shop.deploy(made)
    return made


@pytest.fixture
def versions(shop: Shop, old: Release) -> Release:
    """The release with a second version of an event."""
    del old
    made = shop.release("versions", weighed_v1=WEIGHED_1, weighed_v2=WEIGHED_2)
    made.ask(TRAIL, "crate", has_scale=True)
    made.ask(WEIGHTS, "crate.weighed", has_scale=True)
    return made


@pytest.fixture
def types(shop: Shop, old: Release) -> Release:
    """The release with a second event."""
    del old
    made = shop.release("types", weighed_v1=WEIGHED_1, labelled_v1=LABELLED)
    made.ask(TRAIL, "crate")
    made.ask(WEIGHTS, "crate.weighed", "crate.labelled")
    return made


def refused(settings: Settings, kind: str) -> bool:
    """Whether the database refuses an event of a client that does not use `append`."""
    event = event_of(kind, "01a1fc75-167d-7239-af57-d1ee1a62e0a6", 1)
    row = (event.aggregatetype, event.aggregateid, event.type, event.schema_version)
    sql = "INSERT INTO outbox (aggregatetype, aggregateid, type, schema_version, payload) VALUES (%s, %s, %s, %s, '{}')"
    try:
        query(settings, f"BEGIN; {sql}; ROLLBACK", SourceRole.APP, row)
    except psycopg2.errors.CheckViolation as error:
        return error.diag.constraint_name == "event_is_declared"
    return False


def migrate(shop: Shop, release: Release, kind: str) -> None:
    """Let the database take the events of a release, beside the service that goes on."""
    assert refused(shop.settings, kind)
    assert f"added crate.{kind}" in shop.succeed(release, "migrate")
    assert not refused(shop.settings, kind)


def scales(shop: Shop, release: Release) -> set[object]:
    """Values that the projection of a release has seen in the column that came with version 2."""
    sql = "SELECT DISTINCT scale FROM trail WHERE release = %s"
    return {scale for (scale,) in Database(shop.settings).query(sql, release.name)}


def require_complete(shop: Shop, release: Release, *sinks: str) -> None:
    """Each event was applied once, those of a crate in their order, and a check finds nothing wrong."""
    written = shop.written()
    assert len(written) == KEYS
    for sink in sinks:
        assert shop.trail(sink) == written
        assert shop.reasons(sink) == {}
    report = shop.check(release)
    assert report["findings"] == []
    assert report["settled"]


class TestVersion:
    def test_sinks_first(self, shop: Shop, old: Release, versions: Release) -> None:
        with shop.writing(chosen_seed()) as service:
            with shop.running(old, TRAIL, WEIGHTS) as sink:
                shop.wait_more(sink, TRAIL, WEIGHTS)
            with shop.running(versions, TRAIL, WEIGHTS) as sink:
                shop.wait_more(sink, TRAIL, WEIGHTS)
                migrate(shop, versions, "weighed.v2")
                shop.deploy(versions)
                service.kinds = lambda _: ["weighed.v1", "weighed.v2"]  # older instances go on for a while
                shop.wait_more(sink, TRAIL, WEIGHTS)
                service.kinds = lambda _: ["weighed.v2"]
                shop.wait_more(sink, TRAIL, WEIGHTS)
        shop.finish(versions, TRAIL, WEIGHTS)
        for sink_name in (TRAIL, WEIGHTS):
            assert Database(shop.settings, sink_name).dead_letters() == {}, "nothing was set aside"
        assert scales(shop, old) == {None}
        assert scales(shop, versions) == {OLD_SCALE, "belt"}
        require_complete(shop, versions, TRAIL, WEIGHTS)

    def test_service_first(self, shop: Shop, old: Release, versions: Release) -> None:
        with shop.writing(chosen_seed()) as service:
            with shop.running(old, TRAIL, WEIGHTS) as sink:
                shop.wait_more(sink, TRAIL, WEIGHTS)
                migrate(shop, versions, "weighed.v2")
                shop.deploy(versions)
                service.kinds = newer_for_some
                self.wait_set_aside(shop, sink)
                shop.wait_more(sink, TRAIL, WEIGHTS)  # of the other crates
            held_back = set(shop.written("weighed")) - self.complete_keys(shop)
            assert held_back == set(service.keys[: KEYS // 2]), "and no other crate waits"
            service.kinds = lambda _: ["weighed.v1", "weighed.v2"]
            with shop.running(versions, TRAIL, WEIGHTS) as sink:
                shop.wait_more(sink, TRAIL, WEIGHTS)
                replayed = shop.succeed(versions, "dead-letters", "replay", "--reason", "unknown schema version")
                assert "0 rejected again" in replayed
                shop.wait_more(sink, TRAIL, WEIGHTS)
        shop.finish(versions, TRAIL, WEIGHTS)
        for sink_name in (TRAIL, WEIGHTS):
            assert set(shop.reasons(sink_name, "replayed")) == {"unknown schema version", "parked"}
        assert scales(shop, versions) == {OLD_SCALE, "belt"}
        require_complete(shop, versions, TRAIL, WEIGHTS)

    @staticmethod
    def wait_set_aside(shop: Shop, sink: ReleasedSink) -> None:
        """Wait until events of the newer version are set aside, and later ones of all their crates wait."""

        def waits() -> bool:
            assert sink.is_running(), sink.tail()
            return all(
                shop.reasons(name).get(reason, 0) > KEYS
                for name in (TRAIL, WEIGHTS)
                for reason in ("unknown schema version", "parked")
            )

        wait_for("events to be set aside", waits, timeout_s=TIMEOUT_S)

    @staticmethod
    def complete_keys(shop: Shop) -> set[str]:
        """The crates of which no event is set aside."""
        rows = Database(shop.settings).query("SELECT DISTINCT convert_from(key, 'UTF8') FROM dead_letters")
        return set(shop.written()) - {str(key) for (key,) in rows}


class TestType:
    def test_service_first(self, shop: Shop, old: Release, types: Release) -> None:
        with shop.writing(chosen_seed()) as service:
            with shop.running(old, TRAIL, WEIGHTS) as sink:
                shop.wait_more(sink, TRAIL, WEIGHTS)
                self.write_labels(shop, types, service)
                self.wait_unknown(shop, sink)
            assert shop.reasons(WEIGHTS) == {}, "it does not name the aggregate"
            assert skipped(shop) == [(WEIGHTS, "*.labelled")]
            with shop.running(types, TRAIL) as sink:
                replayed = shop.succeed(types, "dead-letters", "replay", "--reason", "unknown event type")
                assert "0 rejected again" in replayed
                shop.wait_more(sink, TRAIL)
            failure = reported_failure(shop.catch_up(types, WEIGHTS))
            assert "asks for *.labelled, which the sink has passed until now" in failure
            shop.succeed(types, "rewind", WEIGHTS, "--to-earliest", "--yes")
            with shop.running(types, WEIGHTS) as sink:
                shop.wait_more(sink, WEIGHTS)
        shop.finish(types, TRAIL, WEIGHTS)
        assert {key: sorted(found) for key, found in shop.trail(WEIGHTS).items()} == shop.written()
        assert shop.reasons(WEIGHTS) == {}
        require_complete(shop, types, TRAIL)

    @staticmethod
    def write_labels(shop: Shop, types: Release, service: Crates) -> None:
        """Deploy the service, which labels crates from now on."""
        migrate(shop, types, "labelled.v1")
        shop.deploy(types)
        service.kinds = lambda _: ["weighed.v1", "labelled.v1"]

    @staticmethod
    def wait_unknown(shop: Shop, sink: ReleasedSink) -> None:
        """Wait until labels are set aside by one sink, and skipped by the other."""

        def has_come() -> bool:
            assert sink.is_running(), sink.tail()
            return shop.reasons(TRAIL).get("unknown event type", 0) > KEYS and skipped(shop) != []

        wait_for("labels to be set aside and skipped", has_come, timeout_s=TIMEOUT_S)


def newer_for_some(number: int) -> list[str]:
    """The kinds of events while some instances of the service are new: half of the crates have both versions."""
    return ["weighed.v1", "weighed.v2"] if number < KEYS // 2 else ["weighed.v1"]


def skipped(shop: Shop) -> list[tuple[object, ...]]:
    """Events that sinks have recorded as skipped."""
    return Database(shop.settings).query("SELECT sink, event FROM skipped_events ORDER BY 1, 2")
