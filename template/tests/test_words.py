"""Most of the repository knows no sample: the ledger's words occur neither in the machinery and its tests, nor in what
runs, shows and watches any project. And a name that the project chose stands in ``[tool.outbox]`` alone.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from outbox.base import project

from template.tests.paths import ROOT

FOLDERS = ("machinery/src", "machinery/tests", "demo", "monitoring", ".github")
SUFFIXES = (".py", ".sql", ".json", ".xml", ".toml", ".conf", ".properties", ".yml", ".md", ".svg", ".txt")
FILES = ("docker-compose.yml", "Dockerfile", "Makefile", ".env.example")
CONNECT = ("*.json",)
SAMPLE = ("demo/workload.py", "demo/soak.py", "demo/page/", "connect/changes.json")  # the project's own
OPTIONAL = ("demo", "monitoring", ".github")  # a project may have deleted them

LEDGER = re.compile(r"account|amount|balance(?!d)|currenc|ledger|transfer", re.IGNORECASE)
# Words of HTTP, Kafka, GitHub and S3 that contain one of these.
OTHERS = re.compile(r"transfer-?(en)?coding|s3-?transfer(-manager)?|rebalance|concurren", re.IGNORECASE)

# Where a name of [tool.outbox] could be written a second time.
EVERYWHERE = (
    *("bench", "connect", "demo", "docs", "migrations", "monitoring", "machinery", "requirements", "service", "sinks"),
    *("tests", ".github", ".ci/run", *FILES, "*.md"),
)


def files_of(place: str) -> list[Path]:
    """The text files of a folder, or the files that a pattern matches."""
    found = [file for file in (ROOT / place).rglob("*") if file.suffix in SUFFIXES] or ROOT.glob(place)
    return sorted(file for file in found if file.is_file())


def found(text: str) -> list[str]:
    """The ledger's words in a text, each with its line."""
    lines = enumerate(OTHERS.sub("", text).splitlines(), 1)
    return [f"{number}: {line.strip()}" for number, line in lines if LEDGER.search(line)]


@pytest.mark.parametrize("place", [*FOLDERS, *FILES, *(f"connect/{pattern}" for pattern in CONNECT)])
def test_no_file_and_no_line_has_a_word_of_the_ledger(place: str) -> None:
    files = [file for file in files_of(place) if not file.relative_to(ROOT).as_posix().startswith(SAMPLE)]
    assert files or (place in OPTIONAL and not (ROOT / place).exists())
    wrong = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in found(file.read_text())]
    wrong += [str(file.relative_to(ROOT)) for file in files if LEDGER.search(file.relative_to(ROOT).as_posix())]
    assert wrong == []


def test_the_page_that_leads_to_a_domain_has_no_word_of_the_ledger() -> None:
    assert found((ROOT / "docs" / "adopting.md").read_text()) == []


@pytest.mark.parametrize("text", ["of an account", "BALANCES", "currencies", "ledger_owner", "self._transfer()"])
def test_a_word_is_found_wherever_it_stands(text: str) -> None:
    assert found(f"first\n{text}") == [f"2: {text}"]


@pytest.mark.parametrize(
    "text", ["Transfer-Encoding: chunked", "scheduled.rebalance.max.delay.ms", "balanced", "concurrency:"]
)
def test_words_of_others_are_none_of_the_ledger(text: str) -> None:
    assert found(text) == []


def test_a_name_of_the_project_stands_in_its_table_alone() -> None:
    ours = project.load(ROOT)
    names = {ours.source_database, ours.sink_database, ours.topic_prefix, ours.connector}
    names = {name for name in names if not name.isalpha()}  # a plain word is also a word of the domain
    files = [file for place in EVERYWHERE for file in files_of(place)]
    assert len(files) > 100
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in names
        if name in file.read_text(errors="ignore")
    ]
    assert wrong == []
