"""Two projects run on one machine at the same time and do not touch each other: one made by copier, and one that is a
plain clone whose names were changed in the one file that has them.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from template.tests import bake, scratch
from template.tests.bake import Template

pytestmark = pytest.mark.copies

# What the walkthrough begins with, sent to the service in this process.
SEND = """
import json, uuid
from demo.workload import Workload
from outbox.base import settings
from service.app import create_app

token = settings.load().service_token.get_secret_value()
client = create_app().test_client()

def send(planned):
    answers = []
    for request in planned:
        headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": str(uuid.uuid4())}
        answer = client.post(request.path, json=request.body, headers=headers)
        assert answer.status_code in request.expected, answer.text
        answers.append(answer.json)
    return answers

Workload(1).set_up(send)
"""
EVENTS = (100, 331)  # arrivals; accounts opened, funded by two events each, frozen, closed


@dataclass(frozen=True)
class Running:
    """A project whose stack runs."""

    folder: Path

    @property
    def names(self) -> dict[str, Any]:
        """Every name that it chose."""
        names: dict[str, Any] = tomllib.loads((self.folder / "pyproject.toml").read_text())["tool"]["outbox"]
        return names

    @property
    def ports(self) -> set[str]:
        """The ports that its stack listens on."""
        return set(re.findall(r"_PORT=(\d+)", (self.folder / ".outbox" / "stack.env").read_text()))

    def outbox(self, *words: str) -> str:
        """What a command has printed."""
        return bake.python(self.folder, "-m", "outbox", *words)

    def check(self) -> dict[str, Any]:
        """The report of `outbox check`, which finds no problem."""
        report: dict[str, Any] = json.loads(self.outbox("check", "--json", "--wait", "60"))
        return report


@pytest.fixture
def projects(tmp_path: Path) -> Iterator[tuple[Running, Running]]:
    """A project made by copier, and a clone with names of its own."""
    made = Template(tmp_path / "template").made(tmp_path / "stock room", project_name="stock-room", sample="minimal")
    clone = scratch.copy(tmp_path / "clone")
    names = clone / "pyproject.toml"
    text, count = re.subn(r'(-database|topic-prefix|connector) = "ledger', r'\1 = "bank', names.read_text())
    assert count == 4
    names.write_text(text)
    both = Running(made), Running(clone)
    try:
        for project in both:
            project.outbox("up")
            project.outbox("migrate")
            project.outbox("connect", "apply")
        yield both
    finally:
        for project in both:
            project.outbox("down")


def test_two_projects_run_side_by_side(projects: tuple[Running, Running]) -> None:
    made, clone = projects
    assert not made.ports & clone.ports
    own = ("source-database", "sink-database", "topic-prefix", "connector")
    assert not {made.names[name] for name in own} & {clone.names[name] for name in own}
    for project, events in zip(projects, EVENTS, strict=True):
        bake.python(project.folder, "-c", SEND)
        project.outbox("sink", "--until-caught-up")
        report = project.check()
        assert report["total"]["records"] == events
        assert all(topic["name"].startswith(f"{project.names['topic-prefix']}.") for topic in report["topics"])
        assert [sink["name"] for sink in report["sinks"]] == sorted(project.names["sinks"])
    made.outbox("down")
    assert clone.check()["total"]["records"] == EVENTS[1]
