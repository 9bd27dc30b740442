"""The declarations of targets: what cannot be used is refused at the start. And what they read back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.base.wait import WaitTimeoutError
from outbox.handlers import handler
from outbox.kafka import topics
from outbox.sink.applying.function import FunctionTarget
from outbox.sink.applying.handlers.target import HandlerTarget
from outbox.sink.applying.topic_writer import PLACE, origin
from outbox.sink.applying.topics import TopicTarget
from outbox.sink.spec import SinkSpec, Target
from outbox.targets import newest
from outbox_lab.testing.failures import raises
from tests import items, targets
from tests.support.made_events import MAIN, TOPIC

SETTINGS = load(environment=False)
FUNCTION = FunctionTarget(f"{targets.__name__}:write")


def spec_of(target: Target, **changed: Any) -> SinkSpec:
    return replace(MAIN, job=replace(MAIN.job, target=target, projections=Path("none"), **changed), target=target)


# Topics -------------------------------------------------------------------------------------------------------------


async def later(event: object) -> object:
    return event


def several(event: object) -> Iterator[object]:
    yield event


@pytest.mark.parametrize(
    ("target", "part"),
    [
        (TopicTarget(MAIN.topics[0]), "that it reads"),
        (TopicTarget("copies", by="stock.nowhere:by"), "cannot be imported"),
        (TopicTarget("copies", by="stock.service:INSERT"), "is no function"),
        (TopicTarget("copies", by="by"), "cannot be imported"),
        (TopicTarget("copies", by=f"{__name__}:later"), "async or a generator"),
        (TopicTarget("copies", by=f"{__name__}:several"), "async or a generator"),
    ],
)
def test_a_topic_that_cannot_be_written_is_refused(target: TopicTarget, part: str) -> None:
    with raises("sink-unusable", part):
        target.require_usable(spec_of(target))


def test_a_topic_takes_declared_events_and_no_projections(tmp_path: Path) -> None:
    target = TopicTarget("copies")
    target.require_usable(spec_of(target))
    with raises("sink-unusable", "declared events"):
        target.require_usable(spec_of(target, events=()))
    (tmp_path / "totals.sql").touch()
    with raises("sink-unusable", "totals.sql"):
        target.require_usable(replace(MAIN, job=replace(MAIN.job, projections=tmp_path), target=target))


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (TopicTarget("copies"), "topic"),
        (TopicTarget("copies"), "source"),
        (FUNCTION, "source"),
        (HandlerTarget(handler("order")(print)), "topic"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(target: Target, source: str) -> None:
    with raises("rebuild-unsupported"):
        target.require_rebuildable(spec_of(target), source)


@pytest.mark.parametrize("text", ["", "copies", "copies a/1/", "copies a/1/9999999999999999999", "c\nd a/1/2"])
def test_a_header_of_others_is_no_origin(text: str) -> None:
    assert PLACE.fullmatch(text) is None
    found = PLACE.fullmatch(origin("by-unit", "stock.item", 3, 14).decode())
    assert found is not None
    assert found.groups() == ("by-unit", "stock.item", "3", "14")


def test_a_partition_that_no_broker_leads_is_unavailable_and_no_open_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask() -> None:
        raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))

    monkeypatch.setattr(topics, "REQUEST_TIMEOUT_S", 0.01)
    with pytest.raises(Failure) as raised:
        topics.ask_leaders("orders", ask)
    assert not isinstance(raised.value, WaitTimeoutError)
    assert raised.value.code == "kafka-unavailable"


# Functions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["def write(", "import sys; sys.exit(0)", "raise ValueError('a\\nb')"])
def test_a_module_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    (tmp_path / "broken_target.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    target = FunctionTarget("broken_target:write")
    spec = spec_of(target)
    for use in (
        lambda: target.require_usable(spec),
        lambda: target.state(SETTINGS, spec),
        lambda: target.erase(SETTINGS, spec, TOPIC, "a", dry_run=True),
    ):
        with raises("sink-unusable", "broken_target:write", "cannot be imported"):
            use()


def test_totals_are_numbers_and_versions_are_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("a", "1.50", "2"), (5, None, None), ("b", 0.5, Decimal(7))]
    monkeypatch.setattr(targets, "totals", lambda: rows)
    found = [("a", Decimal("1.5"), 2), (5, Decimal(0), None), ("b", Decimal("0.5"), 7)]
    assert [*FUNCTION.totals(spec_of(FUNCTION))] == found
    for row in [("a", "NaN", 1), ("a", float("inf"), 1), ("a", 1, 1.5), ("a", 1, float("nan")), ("a", 1)]:
        monkeypatch.setattr(targets, "totals", lambda row=row: [row])
        with raises("target-failed", "tests.targets:write"):
            list(FUNCTION.totals(spec_of(FUNCTION)))


@pytest.mark.parametrize(("returned", "code"), [(-1, "target-wrong"), ("many", "target-failed")])
def test_what_is_no_number_of_erased_rows_is_refused(
    monkeypatch: pytest.MonkeyPatch, returned: object, code: str
) -> None:
    monkeypatch.setattr(targets, "erase", lambda **_: returned)
    with raises(code, "tests.targets:write"):
        FUNCTION.erase(SETTINGS, spec_of(FUNCTION), TOPIC, "a", dry_run=True)


def test_any_version_is_newer_than_none() -> None:
    columns = {"row": ["a", "a", "b", "b"], "version": [2, None, None, 1], "partition": [0] * 4, "offset": [0, 1, 2, 3]}
    found = newest(pa.table(columns), key="row", version="version")
    assert found.select(["row", "version"]).to_pylist() == [{"row": "b", "version": 1}, {"row": "a", "version": 2}]


# Handlers -----------------------------------------------------------------------------------------------------------


def generator(*_: object) -> Iterator[None]:
    yield


async def async_generator(*_: object) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(
    "declare",
    [
        lambda: handler(items.AGGREGATE)(generator),  # type: ignore[arg-type]
        lambda: handler(items.AGGREGATE)(async_generator),  # type: ignore[arg-type]
        lambda: handler(print),  # type: ignore[arg-type]
        lambda: handler(items.AGGREGATE, workers=0),
        lambda: handler(items.AGGREGATE, attempts=0),
        lambda: handler(items.AGGREGATE, begin="newest"),  # type: ignore[arg-type]
    ],
    ids=["generator", "async generator", "no events", "no workers", "no attempts", "another beginning"],
)
def test_a_handler_that_would_never_run_is_refused_at_once(declare: Callable[[], object]) -> None:
    with raises("sink-unusable"):
        declare()
