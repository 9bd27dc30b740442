"""Faults of the soak that look at what a command has printed, and what the testbed notes of the connector."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import pytest

from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.events.schema import Rejection
from outbox.relay import lifecycle
from outbox.relay.connectors import Connector
from outbox.sink.decoding import records
from outbox_lab.soak import captures, operator, testbed
from outbox_lab.soak.domain import TableCopy
from outbox_lab.soak.fault import NoChance, NotFired
from outbox_lab.soak.faults import commands
from outbox_lab.soak.faults.commands import Check, ConnectApply, Prune, Rebuild, is_rebuildable
from outbox_lab.soak.faults.records import Decades, Foreign, Hostile, Huge, Malformed, asks_for
from outbox_lab.soak.foreign import ForeignEvent
from outbox_lab.soak.operator import PREFIX, Done
from outbox_lab.soak.proxy import Proxy
from outbox_lab.soak.testbed import LINKS
from outbox_lab.stack import ports
from outbox_lab.stack.command import Command
from outbox_lab.testing import chosen_seed


@contextmanager
def linked(tmp_path: Path, *sinks: Sequence[str]) -> Iterator[testbed.Testbed]:
    """A testbed with its links, and nothing that runs. ``sinks``: those of each process."""
    made = testbed.Testbed(load(tmp_path, environment=False), sinks)
    made.stack.links = {name: Proxy(name, ports.choose(0)[0]) for name in LINKS}
    try:
        yield made
    finally:
        for link in made.links.values():
            link.close()


@pytest.fixture
def unstarted(tmp_path: Path) -> Iterator[testbed.Testbed]:
    """A testbed without sinks."""
    with linked(tmp_path) as made:
        yield made


def found(code: str, sink: str | None = None, *keys: str) -> Done:
    """The output of a check with one finding; of a drift, in these keys."""
    finding = {"code": code, "sink": sink, "comparison": "pieces", "message": "…", "count": 1}
    sinks = [{"name": sink, "comparisons": [{"name": "pieces", "drift": dict.fromkeys(keys, 1)}]}]
    return Done(1, json.dumps({"findings": [finding], "sinks": sinks, "topics": [], "total": {"duplicates": 0}}), "")


class TestCheck:
    fault = Check("check-incremental", "check", "--incremental", "--json")

    @pytest.mark.parametrize("done", [found("malformed-records"), found("sink-parked", "unknown")])
    def test_what_other_faults_cause_is_accepted(self, unstarted: testbed.Testbed, done: Done) -> None:
        self.fault.finish(unstarted, done)

    @pytest.mark.parametrize("done", [found("events-lost"), found("sink-drift", "unknown"), found("versions-missing")])
    def test_a_loss_is_not(self, unstarted: testbed.Testbed, done: Done) -> None:
        with pytest.raises(NotFired, match=json.loads(done.output)["findings"][0]["code"]):
            self.fault.finish(unstarted, done)

    @pytest.mark.parametrize("done", [found("foreign-events"), found("sink-drift", "unknown", "x")])
    def test_foreign_events_that_a_fault_has_sent_are_accepted(self, unstarted: testbed.Testbed, done: Done) -> None:
        with pytest.raises(NotFired):
            self.fault.finish(unstarted, done)
        unstarted.foreign.append(ForeignEvent("order.placed", "x", {}))
        self.fault.finish(unstarted, done)


@pytest.fixture
def capturing(tmp_path: Path) -> testbed.Testbed:
    """A testbed with the sink of a captured table, and nothing that runs."""
    return testbed.Testbed(load(tmp_path, environment=False), [["dedup", "changes"]])


@pytest.mark.parametrize("status", [0, 1])
def test_each_connector_is_applied_and_its_releases_are_counted(
    capturing: testbed.Testbed, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    ran: list[Sequence[str]] = []

    def run(_: Command, words: Sequence[str]) -> Done:
        ran.append(words)
        connector = capturing.connectors[len(ran) - 1]
        said = f"{lifecycle.released(connector)}\n" if connector.is_outbox else ""
        return Done(status, said, f"{PREFIX}connector-failed\n" if status else "")

    monkeypatch.setattr(operator, "run", run)
    with closing(Proxy("debezium-postgres", ports.choose(0)[0])) as link:
        capturing.stack.links = {link.name: link}
        ConnectApply("connect-apply", "connect", "apply").fire(capturing, Random(1))  # noqa: S311
    assert ran == [("connect", "apply"), ("connect", "apply", "changes")]
    assert +capturing.released == {"outbox": 1}


def failed(code: str) -> Done:
    """A command that ended with this code."""
    return Done(1, "", f"outbox: it failed\n{PREFIX}{code}")


def test_a_prune_that_is_refused_for_a_while_is_run_until_it_succeeds(
    unstarted: testbed.Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter([failed("events-not-on-topic"), failed("kafka-unavailable"), Done(0, "deleted 3 events\n", "")])
    monkeypatch.setattr(unstarted, "run", lambda *_, **__: next(ends))
    monkeypatch.setattr(commands, "AGAIN_S", 0.0)
    assert Prune("prune", "prune").fire(unstarted, Random(1)) == "outbox prune: deleted 3 events"  # noqa: S311


@pytest.mark.parametrize("refused", [{"dedup"}, {"upsert"}, {"dedup", "upsert"}, set()], ids=len)
def test_a_rebuild_that_is_refused_tries_the_next_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: set[str]
) -> None:
    tried: list[str] = []

    def run(command: str, sink: str, *_: str, links: Sequence[str]) -> Done:
        del links
        tried.append(sink)
        return failed("topic-incomplete") if sink in refused else Done(0, f"{command} of {sink}\n", "")

    fault = Rebuild("topic")
    with linked(tmp_path, ["dedup"], ["upsert"]) as bed:
        monkeypatch.setattr(bed, "check", lambda _: None)
        monkeypatch.setattr(bed, "run", run)
        if len(refused) == 2:
            with pytest.raises(NoChance, match="topic-incomplete"):
                fault.fire(bed, Random(chosen_seed()))  # noqa: S311
            assert set(tried) == refused
        else:
            assert fault.fire(bed, Random(chosen_seed())) == f"rebuild of {tried[-1]}"  # noqa: S311
            assert tried[-1] not in refused
        assert fault.victims == (bed.process_of(tried[-1]).name,)


def test_a_testbed_has_the_connectors_that_its_sinks_need(
    unstarted: testbed.Testbed, capturing: testbed.Testbed
) -> None:
    assert [one.kind for one in unstarted.connectors] == ["outbox"]
    assert [one.kind for one in capturing.connectors] == ["outbox", "changes"]


class Domain:
    """A domain that says how to compare the tables of these sinks."""

    def __init__(self, *names: str) -> None:
        self.copies = {name: TableCopy("SELECT 1 AS id", "SELECT 1 AS id") for name in names}


def test_a_sink_of_a_captured_table_is_compared_row_by_row(capturing: testbed.Testbed) -> None:
    settings, specs = capturing.settings, capturing.sink_specs
    captures.require_copies(settings, Domain("changes"), specs)  # type: ignore[arg-type]
    for domain in (Domain(), Domain("dedup"), object()):
        with pytest.raises(Failure) as raised:
            captures.require_copies(settings, domain, specs)  # type: ignore[arg-type]
        assert raised.value.code == "soak-domain-wrong"
    captures.require_copies(settings, object(), specs[:1])  # type: ignore[arg-type]


def test_only_a_sink_with_sql_for_it_is_rebuilt_from_the_source(capturing: testbed.Testbed) -> None:
    events, changes = capturing.sink_specs
    assert [is_rebuildable(events, where) for where in ("topic", "source")] == [True, True]
    assert [is_rebuildable(changes, where) for where in ("topic", "source")] == [True, False]


@pytest.mark.parametrize("fault", [Foreign(), Malformed(), Huge()], ids=lambda one: one.name)
def test_a_hostile_record_for_a_captured_table_is_no_change(capturing: testbed.Testbed, fault: Hostile) -> None:
    _, sink = capturing.sink_specs
    [topic] = sink.topics
    decoder = sink.decoders[topic]
    made = list(fault.records(capturing, topic, Random(1)))  # noqa: S311
    assert made
    for record in made:
        found = decoder.record(records.Record(record.key, [], record.value, 0))
        assert isinstance(found, Rejection)
        assert asks_for(capturing, sink, topic, record)


def test_captured_tables_get_hostile_records_not_forged_events(
    unstarted: testbed.Testbed, capturing: testbed.Testbed
) -> None:
    [topic] = capturing.sink_specs[1].topics

    def chosen(of: testbed.Testbed, fault: Hostile) -> set[str]:
        return {fault.topic(of, Random(seed)) for seed in range(50)}  # noqa: S311

    assert topic in chosen(capturing, Foreign())
    assert chosen(capturing, Foreign()) - {topic} == chosen(unstarted, Foreign()) == chosen(capturing, Decades())


def test_a_broker_that_is_killed_during_an_apply_is_not_forgotten(
    unstarted: testbed.Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(settings: Settings, connector: Connector, on_release: Callable[[], None]) -> str:
        del settings, connector, on_release
        unstarted.may_hang = True  # as a fault in another thread does
        return "unchanged"

    monkeypatch.setattr("outbox.relay.lifecycle.apply", apply)
    unstarted.apply()
    assert unstarted.may_hang


def test_an_apply_that_fails_leaves_it_to_the_next(unstarted: testbed.Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(settings: Settings, connector: Connector, on_release: Callable[[], None]) -> str:
        del settings, connector, on_release
        raise Failure("Connect is unavailable")

    monkeypatch.setattr("outbox.relay.lifecycle.apply", apply)
    unstarted.may_hang = True
    with pytest.raises(Failure):
        unstarted.apply()
    assert unstarted.may_hang


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

    def apply(settings: Settings, connector: Connector, on_release: Callable[[], None]) -> str:
        del settings, connector, on_release
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
