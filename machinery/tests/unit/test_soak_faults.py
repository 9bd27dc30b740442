"""Faults of the soak, without the parts that they break, and what the testbed notes of the connector."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import pytest

from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.base.wait import wait_for
from outbox.events.schema import Rejection
from outbox.relay import lifecycle
from outbox.relay.connectors import Connector
from outbox.sink.decoding import records
from outbox.sink.decoding.decoder import now_ms
from outbox_lab.soak import fault, observe, testbed
from outbox_lab.soak.domain import Effects, Options, TableCopy
from outbox_lab.soak.fault import NotFired, Strike
from outbox_lab.soak.faults import FAULTS, hostile, operations, sinks
from outbox_lab.soak.faults.servers import UNLIMITED, limit_files
from outbox_lab.soak.proxy import Proxy
from outbox_lab.soak.testbed import LINKS, PREFIX, Done
from outbox_lab.stack import ports
from outbox_lab.stack.process import Process
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


def found(code: str, sink: str | None = None) -> Done:
    """The output of a check with one finding."""
    finding = {"code": code, "sink": sink, "message": "…"}
    return Done(1, json.dumps({"findings": [finding], "topics": [], "total": {"duplicates": 0}}), "")


def failed(code: str) -> Done:
    """A command that ended with this code."""
    return Done(1, "", f"outbox: it failed\n{PREFIX}{code}")


def injected(name: str, bed: testbed.Testbed) -> tuple[Strike, str]:
    """A fault that was injected, and its evidence."""
    strike = Strike(FAULTS[name], bed, random.Random(chosen_seed()))  # noqa: S311
    return strike, FAULTS[name].inject(strike)


@pytest.mark.parametrize(
    ("done", "is_expected"),
    [
        (found("malformed-records"), True),
        (found("sink-parked", "unknown"), True),
        (found("events-lost"), False),
        (found("sink-drift", "unknown"), False),
        (found("versions-missing"), False),
        (found("foreign-events"), False),
    ],
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


@pytest.mark.parametrize("status", [0, 1])
def test_each_connector_is_applied_and_its_releases_are_counted(
    capturing: testbed.Testbed, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    ran: list[Sequence[str]] = []

    def run(_: Settings, words: Sequence[str]) -> Done:
        ran.append(words)
        connector = capturing.connectors[len(ran) - 1]
        said = f"{lifecycle.released(connector)}\n" if connector.is_outbox else ""
        return Done(status, said, f"{PREFIX}connector-failed\n" if status else "")

    monkeypatch.setattr(testbed, "run_command", run)
    with closing(Proxy("debezium-postgres", ports.choose(0)[0])) as link:
        capturing.stack.links = {link.name: link}
        injected("connect-apply", capturing)
    assert ran == [("connect", "apply"), ("connect", "apply", "changes")]
    assert +capturing.released == {"outbox": 1}


def test_a_prune_that_is_refused_for_a_while_is_run_until_it_succeeds(
    unstarted: testbed.Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter([failed("events-not-on-topic"), failed("kafka-unavailable"), Done(0, "deleted 3 events\n", "")])
    monkeypatch.setattr(unstarted, "run", lambda *_, **__: next(ends))
    monkeypatch.setattr(fault, "AGAIN_S", 0.0)
    assert injected("prune", unstarted)[1] == "outbox prune: deleted 3 events"


OF_SINKS = ["handlers-killed-in-call", "sinks-engine-changed", "sinks-spark-killed", "sinks-killed-in-topic"]
OF_CLUSTER = [name for name, one in FAULTS.items() if "cluster" in one.parts]


@pytest.mark.parametrize("name", [*OF_CLUSTER, *OF_SINKS])
def test_what_is_not_there_is_not_broken(unstarted: testbed.Testbed, name: str) -> None:
    assert not FAULTS[name].is_possible(unstarted)


def test_sinks_that_run_on_both_engines_change_between_them_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options(
        clustered=["activity"], plain=["orders"], handlers={"item_receipts": Effects("handled_events", "")}
    )
    bed = testbed.Testbed(load(tmp_path, environment=False), [["dedup"], ["lakehouse"]], options)
    bed.stack.links = {name: Proxy(name, ports.choose(0)[0]) for name in LINKS}
    monkeypatch.setattr(bed.stack, "on_cluster", lambda settings: settings)
    assert {one.names[0]: one.engine for one in bed.sinks} == {
        **{
            "dedup": "spark",
            "lakehouse": "spark",
            "activity": "cluster",
            "orders": "plain",
            "item_receipts": "handlers",
        }
    }
    on_either = sinks.on_either(bed)
    assert [one.names for one in on_either] == [["dedup"], ["orders"]]
    commands = {one.names[0]: one.argv()[3:] for one in bed.sinks}
    assert commands["orders"] == ["sink", "--plain", "orders"]
    assert commands["item_receipts"] == ["handle", "item_receipts"]
    for one in on_either:
        one.run_on(sinks.OTHER[one.engine])
    assert [one.argv()[3:] for one in on_either] == [["sink", "--plain", "dedup"], ["sink", "orders"]]
    monkeypatch.setattr(testbed.SinkPart, "start", lambda _: None)
    sinks.restart(Strike(FAULTS["sinks-engine-changed"], bed, random.Random(1)))  # noqa: S311
    assert {one.names[0]: one.argv()[3:] for one in bed.sinks} == commands
    for link in bed.links.values():
        link.close()


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
    observe.require_copies(settings, Domain("changes"), specs)  # type: ignore[arg-type]
    for domain in (Domain(), Domain("dedup"), object()):
        with pytest.raises(Failure) as raised:
            observe.require_copies(settings, domain, specs)  # type: ignore[arg-type]
        assert raised.value.code == "soak-domain-wrong"
    observe.require_copies(settings, object(), specs[:1])  # type: ignore[arg-type]


def test_only_a_sink_with_sql_for_it_is_rebuilt_from_the_source(capturing: testbed.Testbed) -> None:
    events, changes = capturing.sink_specs
    assert [operations.is_rebuildable(events, where) for where in ("topic", "source")] == [True, True]
    assert [operations.is_rebuildable(changes, where) for where in ("topic", "source")] == [True, False]


MAKERS = [hostile.foreign_records, hostile.malformed_records, hostile.huge_records, hostile.records_of_decades]


@pytest.mark.parametrize("make", MAKERS)
def test_a_hostile_record_is_invalid(capturing: testbed.Testbed, make: hostile.Make) -> None:
    made = 0
    for topic in hostile.topics_for(capturing, make):
        for sink in capturing.readers(topic):
            for one in make(capturing, topic, random.Random(chosen_seed())):  # noqa: S311
                headers = [(name, value) for name, value in one.headers.items() if value is not None]
                found = sink.decoders[topic].record(records.Record(one.key, headers, one.value, now_ms()))
                is_skipped = not hostile.asks_for(capturing, sink, topic, one)
                assert isinstance(found, Rejection) or is_skipped, found
                made += not is_skipped
    assert made


def test_captured_tables_get_hostile_records_but_none_about_ids(
    unstarted: testbed.Testbed, capturing: testbed.Testbed
) -> None:
    [topic] = capturing.sink_specs[1].topics
    of_events = hostile.topics_for(capturing, hostile.records_with_used_ids)
    assert of_events == hostile.topics_for(unstarted, hostile.malformed_records)
    assert {*of_events, topic} == {*hostile.topics_for(capturing, hostile.malformed_records)}


@pytest.mark.parametrize("fails", [False, True])
def test_a_killed_broker_is_not_forgotten_until_an_apply_has_ended(
    unstarted: testbed.Testbed, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    def apply(*_: object) -> str:
        unstarted.may_hang = not fails  # as a fault in another thread does
        if fails:
            raise Failure("Connect is unavailable")
        return "unchanged"

    monkeypatch.setattr("outbox.relay.lifecycle.apply", apply)
    unstarted.may_hang = fails
    with pytest.raises(Failure) if fails else nullcontext():
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


class Sleeper(Process):
    """A process that does nothing, as root one of another user, as Postgres is."""

    def argv(self) -> Sequence[str | Path]:
        drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
        return [*drop, "sleep", "60"]


def max_file_size(pid: int) -> list[str]:
    """The limit that a process has, and the one that it may set."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith("Max file size")]
    return found.split()[3:5]


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="only Linux limits the files of a process that runs")
def test_the_files_of_a_process_of_another_user_are_limited(tmp_path: Path) -> None:
    sleeper = Sleeper("sleeper", tmp_path)
    sleeper.spawn()
    try:
        wait_for("it to sleep", lambda: sleeper.processes()[0].name() == "sleep", timeout_s=10)
        [process] = sleeper.processes()
        assert limit_files(sleeper, "1024:unlimited") == 1
        assert max_file_size(process.pid) == ["1024", "unlimited"]
        assert limit_files(sleeper, UNLIMITED) == 1
        assert max_file_size(process.pid) == ["unlimited", "unlimited"]
    finally:
        sleeper.kill()
