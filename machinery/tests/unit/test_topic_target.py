"""The declaration of a sink that writes to a topic, and the marks that it leaves beside its offsets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outbox.sink.applying.topics import writer
from outbox.sink.applying.topics.target import TopicTarget
from outbox.sink.spec import SinkSpec
from outbox_lab.testing.failures import raises
from tests.support.made_events import MAIN

TARGET = TopicTarget("copies")


def spec_of(target: TopicTarget, projections: Path) -> SinkSpec:
    return replace(MAIN, job=replace(MAIN.job, target=target, projections=projections), target=target)


@pytest.mark.parametrize(
    "target",
    [
        TopicTarget(MAIN.topics[0]),
        TopicTarget("copies", by="stock.nowhere:by"),
        TopicTarget("copies", by="stock.service:nothing"),
        TopicTarget("copies", by="stock.service:INSERT"),
        TopicTarget("copies", by="by"),
    ],
)
def test_a_target_that_cannot_be_used_is_refused(target: TopicTarget, tmp_path: Path) -> None:
    with raises("sink-unusable"):
        target.require_usable(spec_of(target, tmp_path))


def test_a_topic_takes_declared_events_and_no_projections(tmp_path: Path) -> None:
    spec = spec_of(TARGET, tmp_path)
    TARGET.require_usable(spec)
    with raises("sink-unusable", "declared events"):
        TARGET.require_usable(replace(spec, job=replace(spec.job, events=())))
    (tmp_path / "totals.sql").touch()
    with raises("sink-unusable", "totals.sql"):
        TARGET.require_usable(spec)


def test_nothing_is_rebuilt_on_a_topic(tmp_path: Path) -> None:
    for source in ("topic", "source"):
        with raises("rebuild-unsupported"):
            TARGET.require_rebuildable(spec_of(TARGET, tmp_path), source)


@pytest.mark.parametrize(
    "text",
    ["", "copies", "copies a/b/c", "copies a/1/", "copies a/1/9999999999999999999", "copies a/1/2 ", "c\nd a/1/2"],
)
def test_a_header_of_others_is_no_origin(text: str) -> None:
    assert writer.PLACE.fullmatch(text) is None


def test_an_origin_is_read_back() -> None:
    found = writer.PLACE.fullmatch(writer.origin("by-unit", "stock.item", 3, 14).decode())
    assert found is not None
    assert found.groups() == ("by-unit", "stock.item", "3", "14")
