"""docs/soak.md lists every fault. In a project without a domain, `outbox soak` says how to write one."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from outbox.base import project
from outbox.base.errors import Failure
from outbox_lab.commands.soak import soak
from outbox_lab.soak import domain
from outbox_lab.soak.faults import FAULTS
from outbox_lab.soak.testbed import LINKS
from tests.support.paths import ROOT

ROW = re.compile(r"^\| `([\w-]+)` \| (.+) \|$", re.MULTILINE)


def listed() -> dict[str, str]:
    """The faults of the page, those of links once for each link."""
    found: dict[str, str] = {}
    for name, summary in ROW.findall((ROOT / "docs" / "soak.md").read_text()):
        found |= dict.fromkeys([name.replace("LINK", link) for link in LINKS] if "LINK" in name else [name], summary)
    return found


def test_the_page_lists_every_fault_as_the_command_does() -> None:
    known = {name: fault.summary for name, fault in FAULTS.items()}
    assert listed() == known
    done = CliRunner().invoke(soak, ["--list"])
    assert dict(line.split(maxsplit=1) for line in done.output.splitlines()) == known
    assert [link for link in LINKS if f"`{link}`" not in (ROOT / "docs" / "soak.md").read_text()] == []


@pytest.fixture
def without_domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with a walkthrough, as the smallest one, and no domain for the soak."""
    (tmp_path / "pyproject.toml").write_text("[tool.outbox]\nsoak = 'smallest.soak:Domain'\n")
    (tmp_path / "smallest").mkdir()
    (tmp_path / "smallest" / "__init__.py").touch()
    monkeypatch.setenv(project.VARIABLE, str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("smallest", None)


def test_a_project_without_a_domain_is_told_to_write_one(without_domain: Path) -> None:
    with pytest.raises(Failure) as raised:
        domain.load(1)
    assert raised.value.code == "soak-domain-missing"
    done = CliRunner().invoke(soak, ["--seed", "1"])
    assert isinstance(done.exception, Failure)
    assert done.exception.code == "soak-domain-missing"
    assert not (without_domain / ".outbox").exists(), "it has begun nothing"


def test_an_unknown_fault_is_refused() -> None:
    done = CliRunner().invoke(soak, ["--faults", "kafka-killed,nothing-*"])
    assert isinstance(done.exception, Failure)
    assert done.exception.code == "fault-unknown"


def test_a_domain_that_does_not_group_its_sinks_is_refused(without_domain: Path) -> None:
    source = "class Domain:\n    sinks = ('orders',)\n\n    def __init__(self, seed): pass\n"
    (without_domain / "smallest" / "soak.py").write_text(source)
    with pytest.raises(Failure) as raised:
        domain.load(1)
    assert raised.value.code == "soak-domain-wrong"
