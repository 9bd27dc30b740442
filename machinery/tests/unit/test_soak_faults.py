"""Faults of the soak that look at what a command has printed, and what the testbed notes of the connector."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.soak import testbed
from outbox.soak.fault import NotFired
from outbox.soak.faults.commands import Check, ConnectApply
from outbox.soak.foreign import ForeignEvent
from outbox.soak.operator import Done
from outbox.soak.proxy import Proxy
from outbox.stack import ports


@pytest.fixture
def unstarted(tmp_path: Path) -> Iterator[testbed.Testbed]:
    """A testbed with the link that the connector needs, and nothing that runs."""
    made = testbed.Testbed(load(tmp_path, environment=False), [])
    link = Proxy("debezium-postgres", ports.choose(0)[0])
    made.stack.links = {link.name: link}
    yield made
    link.close()


def found(code: str, sink: str | None = None, *keys: str) -> Done:
    """The output of a check with one finding; of a drift, in these keys."""
    finding = {"code": code, "sink": sink, "comparison": "pieces", "message": "…", "count": 1}
    sinks = [{"name": sink, "comparisons": [{"name": "pieces", "drift": dict.fromkeys(keys, 1)}]}]
    return Done(1, json.dumps({"findings": [finding], "sinks": sinks, "total": {"duplicates": 0}}), "")


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


def test_a_transaction_that_an_operator_has_released_is_counted(unstarted: testbed.Testbed) -> None:
    fault = ConnectApply("connect-apply", "connect", "apply")
    fault.finish(unstarted, Done(0, "connector outbox: unchanged, exactly-once (transaction boundary poll)\n", ""))
    assert unstarted.released == 0
    fault.finish(unstarted, Done(0, "connector outbox: released, exactly-once (transaction boundary poll)\n", ""))
    assert unstarted.released == 1


def test_a_broker_that_is_killed_during_an_apply_is_not_forgotten(
    unstarted: testbed.Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(settings: Settings) -> str:
        del settings
        unstarted.may_hang = True  # as a fault in another thread does
        return "unchanged"

    monkeypatch.setattr("outbox.relay.apply.apply", apply)
    unstarted.apply()
    assert unstarted.may_hang


def test_an_apply_that_fails_leaves_it_to_the_next(unstarted: testbed.Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(settings: Settings) -> str:
        del settings
        raise Failure("Connect is unavailable")

    monkeypatch.setattr("outbox.relay.apply.apply", apply)
    unstarted.may_hang = True
    with pytest.raises(Failure):
        unstarted.apply()
    assert unstarted.may_hang
