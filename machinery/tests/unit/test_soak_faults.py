"""Faults of the soak, without the parts that they break, and what the testbed notes of the connector."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.events import catalog
from outbox.events.schema import Rejection
from outbox.relay.connectors import Connector
from outbox.sink.decoding import records
from outbox.sink.decoding.decoder import now_ms
from outbox_lab.soak import fault, testbed
from outbox_lab.soak.fault import NotFired, Strike
from outbox_lab.soak.faults import FAULTS, hostile, operations
from outbox_lab.soak.proxy import Proxy
from outbox_lab.soak.testbed import LINKS, PREFIX, Done
from outbox_lab.stack import ports
from outbox_lab.testing import chosen_seed


@pytest.fixture
def unstarted(tmp_path: Path) -> Iterator[testbed.Testbed]:
    """A testbed with its links and without sinks, of which nothing runs."""
    made = testbed.Testbed(load(tmp_path, environment=False), [])
    made.stack.links = {name: Proxy(name, ports.choose(0)[0]) for name in LINKS}
    yield made
    for link in made.links.values():
        link.close()


def found(code: str, sink: str | None = None) -> Done:
    """The output of a check with one finding."""
    finding = {"code": code, "sink": sink, "message": "…"}
    return Done(1, json.dumps({"findings": [finding], "topics": [], "total": {"duplicates": 0}}), "")


def failed(code: str) -> Done:
    """A command that ended with this code."""
    return Done(1, "", f"outbox: it failed\n{PREFIX}{code}")


def injected(name: str, bed: testbed.Testbed) -> str:
    """The evidence of a fault that was injected."""
    return FAULTS[name].inject(Strike(FAULTS[name], bed, random.Random(chosen_seed())))  # noqa: S311


@pytest.mark.parametrize(
    ("done", "is_expected"),
    [(found("malformed-records"), True), (found("events-lost"), False), (found("sink-drift", "unknown"), False)],
)
def test_check_may_find_what_other_faults_cause(
    unstarted: testbed.Testbed, monkeypatch: pytest.MonkeyPatch, done: Done, is_expected: bool
) -> None:
    monkeypatch.setattr(unstarted, "run", lambda *_, **__: Done(1, done.output, f"{PREFIX}problems-found"))
    code = json.loads(done.output)["findings"][0]["code"]
    with nullcontext() if is_expected else pytest.raises(NotFired, match=code):
        injected("check-incremental", unstarted)


@pytest.fixture
def capturing(tmp_path: Path) -> testbed.Testbed:
    """A testbed with the sink of a captured table, and nothing that runs."""
    return testbed.Testbed(load(tmp_path, environment=False), [["dedup", "changes"]])


def test_a_prune_that_is_refused_for_a_while_is_run_until_it_succeeds(
    unstarted: testbed.Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter([failed("events-not-on-topic"), failed("kafka-unavailable"), Done(0, "deleted 3 events\n", "")])
    monkeypatch.setattr(unstarted, "run", lambda *_, **__: next(ends))
    monkeypatch.setattr(fault, "AGAIN_S", 0.0)
    assert injected("prune", unstarted) == "outbox prune: deleted 3 events"


OF_SINKS = ["handlers-killed-in-call", "sinks-engine-changed", "sinks-spark-killed", "sinks-killed-in-topic"]


@pytest.mark.parametrize("name", OF_SINKS)
def test_what_is_not_there_is_not_broken(unstarted: testbed.Testbed, name: str) -> None:
    assert not FAULTS[name].is_possible(unstarted)


def test_a_testbed_has_the_connectors_that_its_sinks_need(
    unstarted: testbed.Testbed, capturing: testbed.Testbed
) -> None:
    assert [one.kind for one in unstarted.connectors] == ["outbox"]
    assert [one.kind for one in capturing.connectors] == ["outbox", "changes"]


def test_only_a_sink_with_sql_for_it_is_rebuilt_from_the_source(capturing: testbed.Testbed) -> None:
    events, changes = capturing.sink_specs
    assert [operations.is_rebuildable(events, where) for where in ("topic", "source")] == [True, True]
    assert [operations.is_rebuildable(changes, where) for where in ("topic", "source")] == [True, False]


MAKERS = [hostile.foreign_records, hostile.malformed_records, hostile.huge_records, hostile.records_of_decades]


@pytest.mark.parametrize("make", MAKERS)
def test_a_hostile_record_is_invalid(capturing: testbed.Testbed, make: hostile.Make) -> None:
    made = 0
    for topic in catalog.of_project(capturing.settings).topics:
        for sink in capturing.readers(topic):
            for one in make(capturing, topic, random.Random(chosen_seed())):  # noqa: S311
                headers = [(name, value) for name, value in one.headers.items() if value is not None]
                found = sink.decoders[topic].record(records.Record(one.key, headers, one.value, now_ms()))
                is_skipped = not hostile.asks_for(capturing, sink, topic, one)
                assert isinstance(found, Rejection) or is_skipped, found
                made += not is_skipped
    assert made


@pytest.mark.parametrize(
    ("code", "exactly_once", "done"),
    [("slot-ahead", False, ["apply", "remove", "apply"]), ("slot-ahead", True, None), ("timeout", False, None)],
)
def test_slot_ahead_at_least_once_begins_with_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, exactly_once: bool, done: list[str] | None
) -> None:
    settings = load(tmp_path, environment=False, exactly_once=exactly_once)
    made = testbed.Testbed(settings, [["changes"]])
    monkeypatch.setattr(made.stack, "through", lambda *_: settings)
    [changes] = made.captures
    called: list[str] = []

    def apply(*_: object) -> str:
        called.append("apply")
        if called == ["apply"]:
            raise Failure("it does not go on", code=code)
        return "created"

    def remove(settings: Settings, connector: Connector, *, drop_slot: bool) -> None:
        del settings
        assert (connector.kind, drop_slot) == ("changes", True)
        called.append("remove")

    monkeypatch.setattr("outbox.relay.lifecycle.apply", apply)
    monkeypatch.setattr("outbox.relay.lifecycle.remove", remove)
    if done is None:
        with pytest.raises(Failure):
            made.apply_one(changes)
    else:
        assert made.apply_one(changes) == "created"
        assert called == done
