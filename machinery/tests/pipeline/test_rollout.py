"""A new version and a new event rolled out under load, on the real chain: the sinks first, or the service first."""

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
    Release,
    ReleasedSink,
    Shop,
    event_of,
    opened,
)
from tests.support.sink_driver import Database
from tests.support.sink_process import TIMEOUT_S, reported_failure

TRAIL, WEIGHTS = "trail", "weights"  # a sink of the aggregate, and one of single events
NEW = ["weighed.v2", "labelled.v1"]
BOTH = ["weighed.v1", *NEW]  # older instances of the service go on for a while
SET_ASIDE = {
    TRAIL: {"unknown schema version", "unknown event type", "parked"},
    WEIGHTS: {"unknown schema version", "parked"},
}


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
def new(shop: Shop, old: Release) -> Release:
    """The release with a second version of an event, and with a second event."""
    del old
    made = shop.release("new", weighed_v1=WEIGHED_1, weighed_v2=WEIGHED_2, labelled_v1=LABELLED)
    made.ask(TRAIL, "crate", has_scale=True)
    made.ask(WEIGHTS, "crate.weighed", "crate.labelled", has_scale=True)
    return made


def test_sinks_first(shop: Shop, old: Release, new: Release) -> None:
    with shop.writing(chosen_seed()) as service:
        with shop.running(old, TRAIL, WEIGHTS) as sink:
            shop.wait_more(sink, TRAIL, WEIGHTS)
        with shop.running(new, TRAIL, WEIGHTS) as sink:
            shop.wait_more(sink, TRAIL, WEIGHTS)
            deploy_service(shop, new)
            service.kinds = lambda _: BOTH
            shop.wait_more(sink, TRAIL, WEIGHTS)
            service.kinds = lambda _: NEW
            shop.wait_more(sink, TRAIL, WEIGHTS)
    shop.finish(new, TRAIL, WEIGHTS)
    for sink_name in (TRAIL, WEIGHTS):
        assert Database(shop.settings, sink_name).dead_letters() == {}, "nothing was set aside"
    assert scales(shop, old) == {None}
    require_complete(shop, new, TRAIL, WEIGHTS)


def test_service_first(shop: Shop, old: Release, new: Release) -> None:
    with shop.writing(chosen_seed()) as service:
        with shop.running(old, TRAIL, WEIGHTS) as sink:
            shop.wait_more(sink, TRAIL, WEIGHTS)
            deploy_service(shop, new)
            service.kinds = newer_for_some
            wait_set_aside(shop, sink)
            shop.wait_more(sink, TRAIL, WEIGHTS)  # of the other crates
        assert keys_with_letters(shop) == set(service.keys[: KEYS // 2]), "no other crate waits"
        assert skipped(shop) == [(WEIGHTS, "*.labelled")], "it does not name the aggregate"
        service.kinds = lambda _: BOTH
        with shop.running(new, TRAIL) as sink:
            assert "0 rejected again" in shop.succeed(new, "dead-letters", "replay", "--all")
            shop.wait_more(sink, TRAIL)
        failure = reported_failure(shop.catch_up(new, WEIGHTS))
        assert "asks for *.labelled, which the sink has passed until now" in failure
        shop.succeed(new, "rewind", WEIGHTS, "--to-earliest", "--yes")
        with shop.running(new, WEIGHTS) as sink:
            shop.wait_more(sink, WEIGHTS)
    shop.finish(new, TRAIL, WEIGHTS)
    for sink_name, reasons in SET_ASIDE.items():
        assert set(shop.reasons(sink_name, "replayed")) == reasons
    assert shop.reasons(WEIGHTS) == {}
    # What it had skipped came behind the others of its key.
    assert {key: sorted(found) for key, found in shop.trail(WEIGHTS).items()} == shop.written()
    require_complete(shop, new, TRAIL)


def deploy_service(shop: Shop, release: Release) -> None:
    """Let the database take the new events of a release, beside the service that goes on; then let the service write
    them.
    """
    assert all(is_refused(shop.settings, kind) for kind in NEW)
    shown = shop.succeed(release, "migrate")
    assert all(f"crate.{kind}" in shown for kind in NEW), shown
    assert not any(is_refused(shop.settings, kind) for kind in NEW)
    shop.deploy(release)


def is_refused(settings: Settings, kind: str) -> bool:
    """Whether the database refuses an event of a client that does not use `append`."""
    event = event_of(kind, "01a1fc75-167d-7239-af57-d1ee1a62e0a6", 1)
    row = (event.aggregatetype, event.aggregateid, event.type, event.schema_version)
    sql = "INSERT INTO outbox (aggregatetype, aggregateid, type, schema_version, payload) VALUES (%s, %s, %s, %s, '{}')"
    try:
        query(settings, f"BEGIN; {sql}; ROLLBACK", SourceRole.APP, row)
    except psycopg2.errors.CheckViolation as error:
        return error.diag.constraint_name == "event_is_declared"
    return False


def newer_for_some(number: int) -> list[str]:
    """The kinds of events while some instances of the service are new: half of the crates have newer ones too."""
    return BOTH if number < KEYS // 2 else ["weighed.v1"]


def wait_set_aside(shop: Shop, sink: ReleasedSink) -> None:
    """Wait until new events are set aside or skipped, and later ones of all their crates wait."""

    def waits() -> bool:
        assert sink.is_running(), sink.tail()
        found = {name: shop.reasons(name) for name in SET_ASIDE}
        are_aside = all(found[name].get(reason, 0) > KEYS for name, all_of in SET_ASIDE.items() for reason in all_of)
        return are_aside and skipped(shop) != []

    wait_for("events to be set aside", waits, timeout_s=TIMEOUT_S)


def keys_with_letters(shop: Shop) -> set[str]:
    """The crates of which an event is set aside."""
    rows = Database(shop.settings).query("SELECT DISTINCT convert_from(key, 'UTF8') FROM dead_letters")
    return {str(key) for (key,) in rows}


def skipped(shop: Shop) -> list[tuple[object, ...]]:
    """Events that sinks have recorded as skipped."""
    return Database(shop.settings).query("SELECT sink, event FROM skipped_events ORDER BY 1, 2")


def scales(shop: Shop, release: Release) -> set[object]:
    """Values that the projection of a release has seen in the column that came with version 2."""
    sql = "SELECT DISTINCT scale FROM trail WHERE release = %s AND grams > 0"
    return {scale for (scale,) in Database(shop.settings).query(sql, release.name)}


def require_complete(shop: Shop, release: Release, *sinks: str) -> None:
    """Each event was applied once, those of a crate in their order, and a check finds nothing wrong."""
    assert scales(shop, release) == {OLD_SCALE, "belt"}
    written = shop.written()
    assert len(written) == KEYS
    for sink in sinks:
        assert shop.trail(sink) == written
        assert shop.reasons(sink) == {}
    report = shop.check(release)
    assert report["findings"] == []
    assert report["settled"]
