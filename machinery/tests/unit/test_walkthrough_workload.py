"""The project's workload: where it is found, and what becomes of a container whose project has no naive sink."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outbox.base import project
from outbox_lab.testing.command import outbox
from outbox_lab.testing.failures import raises
from outbox_lab.walkthrough import naive, workload

WORKLOAD = """
class {name}:
    right = "stock"
    naive = {naive!r}

    def __init__(self, seed):
        self.seed = seed
"""
Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a workload, by the name that ``[tool.outbox]`` has then."""

    def write(module: str = "clients", name: str = "Workload", naive: str | None = None) -> None:
        (tmp_path / f"{module}.py").write_text(WORKLOAD.format(name=name, naive=naive))
        monkeypatch.syspath_prepend(str(tmp_path))
        ours = replace(project.current(), workload=f"{module}:{name}")
        monkeypatch.setattr(project, "current", lambda: ours)

    return write


def test_the_project_says_where_it_is(write: Write) -> None:
    write("clients_elsewhere", "Buyers")
    loaded = workload.load(seed=7)
    assert (type(loaded).__name__, loaded.seed) == ("Buyers", 7)  # type: ignore[attr-defined]


@pytest.mark.parametrize("named", ["nowhere:Workload", "outbox:Nothing", "outbox", ""])
def test_without_one_it_is_a_failure(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = replace(project.current(), workload=named)
    monkeypatch.setattr(project, "current", lambda: ours)
    with raises("workload-missing", "[tool.outbox]"):
        workload.load(seed=1)


def test_the_command_says_that_it_is_missing_or_of_another_project(tmp_path: Path) -> None:
    done = outbox("demo", "--once", home=tmp_path)
    assert done.returncode == 1
    assert "workload" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["naive", None, "unknown"])
def test_a_container_becomes_the_naive_sink_or_waits(
    name: str | None, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(os, "execvp", lambda _, words: done.append(words))
    monkeypatch.setattr(signal, "pause", lambda: done.append("waits"))
    write(f"clients_with_{name}", naive=name)
    naive.main()
    # The real execvp does not return.
    assert done[0] == (["python", "-m", "outbox", "sink", "naive"] if name == "naive" else "waits")
