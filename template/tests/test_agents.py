"""AGENTS.md and llms.txt of a project: each command exists, or is run; each page and file that they name exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import jinja2
import pytest

from template.tests import pages, test_guide
from template.tests.paths import ROOT
from template.tests.test_guide import LINE_MAX, TIMEOUT_S, exists, generated, run

home = test_guide.home
PAGES = ("AGENTS.md", "llms.txt")
LINES_MAX = 80
LATER = {"docs/NAME.md", ".venv/bin/"}


def rendered(page: str) -> str:
    """A page as a project with a copied machinery has it."""
    address = jinja2.DictLoader({"template/address": "https://example.org/template"})
    loader = jinja2.ChoiceLoader([address, jinja2.FileSystemLoader(ROOT)])
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=False)  # noqa: S701
    return environment.get_template(f"template/{page}.jinja").render(project_name="shop", machinery="copy")


@pytest.mark.parametrize("page", PAGES)
def test_page_is_short(page: str) -> None:
    lines = rendered(page).splitlines()
    assert lines[0] in ("# shop", "# Working on shop")
    assert len(lines) <= LINES_MAX
    assert [line for line in lines if len(line) > LINE_MAX and not line.startswith(("|", "- ["))] == []


@pytest.mark.parametrize("page", PAGES)
def test_each_command_exists(page: str) -> None:
    texts = [text.removeprefix(".venv/bin/") for text in pages.commands(rendered(page))]
    commands = [shlex.split(text) for text in texts if re.match(r"(outbox|make) [-a-z]", text)]
    assert len(commands) >= (10 if page == "AGENTS.md" else 2)
    assert [one for one in commands if one[1:] != ["--help"] and not exists(one)] == []


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("sample", ["ledger", "minimal"])
def test_each_file_that_is_named_exists(page: str, sample: str) -> None:
    text = rendered(page)
    named = {one for one in pages.QUOTED.findall(text) if re.fullmatch(r"[\w.-]+(/[\w.-]*)+", one)} - LATER
    linked = {one for one in re.findall(r"\]\(([^)]+)\)", text) if "://" not in one}
    places = (ROOT / "template" / sample, ROOT)
    written = {*PAGES} | {"projections/", "comparisons/"}  # made by copier; in each sink's folder
    assert linked
    named = (named | linked) - written
    assert [one for one in sorted(named) if not any((place / one).exists() for place in places)] == []


@pytest.mark.parametrize("page", PAGES)
def test_both_samples_have_it(page: str) -> None:
    for sample in ("ledger", "minimal"):
        link = ROOT / "template" / sample / f"{page}.jinja"
        assert link.resolve() == ROOT / "template" / f"{page}.jinja"


@pytest.mark.copies
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("sample", ["ledger", "minimal"])
def test_commands_of_the_page_pass_the_check(home: Path, sample: str) -> None:
    project = generated(home, sample)
    page = (project / "AGENTS.md").read_text()
    added = pages.block(page, ".venv/bin/outbox new aggregate")
    run(project, added)
    run(project, ".venv/bin/outbox events check --against HEAD && .venv/bin/outbox events columns shipments")
    run(project, ".venv/bin/outbox events export --asyncapi > /dev/null")
    run(project, "make -o .venv/dev check")
