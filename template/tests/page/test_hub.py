"""Messages to subscribers of the page: the whole document, then each change, which is serialised once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from outbox.base.wait import wait_for

from demo.page.hub import CHANGES_KEPT, Hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub(logs={"lines": 3}, tables={"events": 2})
    yield made
    made.close()


def read(frames: Iterator[bytes]) -> tuple[str, Any]:
    """The next frame: its kind and content."""
    kind, data = next(frames).decode().splitlines()[:2]
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_a_subscriber_gets_the_whole_document_and_then_what_changes(hub: Hub) -> None:
    hub.publish({"slot": 1, "source": 2}, logs={"lines": ["a"]}, tables={"events": [{"id": "x", "n": 1}]})
    frames = hub.subscribe()
    kind, whole = read(frames)
    assert kind == "whole"
    assert whole == {
        "parts": {"slot": 1, "source": 2},
        "logs": {"lines": ["a"]},
        "tables": {"events": [{"id": "x", "n": 1}]},
        "limits": {"lines": 3, "events": 2},
    }
    hub.publish({"slot": 1, "source": 3}, tables={"events": [{"id": "x", "n": 2}]})
    assert read(frames) == ("change", {"parts": {"source": 3}, "tables": {"events": [{"id": "x", "n": 2}]}})


def test_logs_and_tables_are_bounded(hub: Hub) -> None:
    hub.publish(logs={"lines": list("abcde")}, tables={"events": [{"id": one} for one in "abc"]})
    _, whole = read(hub.subscribe())
    assert whole["logs"]["lines"] == ["c", "d", "e"]
    assert whole["tables"]["events"] == [{"id": "b"}, {"id": "c"}]


def test_a_slow_subscriber_gets_the_whole_document_again(hub: Hub) -> None:
    frames = hub.subscribe()
    read(frames)
    for number in range(CHANGES_KEPT + 1):
        hub.publish({"slot": number})
    kind, whole = read(frames)
    assert (kind, whole["parts"]) == ("whole", {"slot": CHANGES_KEPT})


def test_a_change_is_serialised_once_for_all(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    subscribers = [hub.subscribe() for _ in range(50)]
    for frames in subscribers:
        read(frames)
    made: list[object] = []
    dumps = json.dumps

    def counted(content: object, **options: Any) -> str:
        made.append(content)
        return dumps(content, **options)

    monkeypatch.setattr(json, "dumps", counted)
    hub.publish({"slot": 1})
    assert {next(frames) for frames in subscribers} == {b'event: change\ndata: {"parts":{"slot":1}}\n\n'}
    assert len(made) == 1


def test_closing_ends_every_subscription(hub: Hub) -> None:
    ended = threading.Event()

    def follow() -> None:
        for _ in hub.subscribe():
            pass
        ended.set()

    threading.Thread(target=follow, daemon=True).start()
    wait_for("the subscriber", lambda: hub.subscribers == 1, timeout_s=10)
    hub.close()
    assert ended.wait(10)
