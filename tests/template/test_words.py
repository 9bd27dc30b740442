"""The machinery knows no sample: the ledger's words occur neither in it nor in the tests that stay with an adopter."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

FOLDERS = ("outbox", "tests/machinery", "tests/support", "tests/fixtures")
LEDGER = re.compile(r"account|amount|balance(?!d)|currenc|ledger|transfer", re.IGNORECASE)
# Words of HTTP and Kafka that contain one of these.
OTHERS = re.compile(r"transfer-?(en)?coding|rebalance", re.IGNORECASE)
FILES = [
    file
    for folder in FOLDERS
    for file in sorted((ROOT / folder).rglob("*"))
    if file.suffix in (".py", ".sql", ".json", ".xml", ".toml", ".conf", ".properties")
]


def found(text: str) -> list[str]:
    """The ledger's words in a text, each with its line."""
    lines = enumerate(OTHERS.sub("", text).splitlines(), 1)
    return [f"{number}: {line.strip()}" for number, line in lines if LEDGER.search(line)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_and_no_line_has_a_word_of_the_ledger(folder: str) -> None:
    files = [file for file in FILES if file.is_relative_to(ROOT / folder)]
    assert len(files) > 3
    wrong = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in found(file.read_text())]
    wrong += [str(file.relative_to(ROOT)) for file in files if LEDGER.search(file.relative_to(ROOT).as_posix())]
    assert wrong == []


def test_the_page_that_leads_to_a_domain_has_no_word_of_the_ledger() -> None:
    assert found((ROOT / "docs" / "adopting.md").read_text()) == []


@pytest.mark.parametrize("text", ["of an account", "BALANCES", "currencies", "ledger_owner", "self._transfer()"])
def test_a_word_is_found_wherever_it_stands(text: str) -> None:
    assert found(f"first\n{text}") == [f"2: {text}"]


@pytest.mark.parametrize("text", ["Transfer-Encoding: chunked", "scheduled.rebalance.max.delay.ms", "balanced"])
def test_words_of_others_are_none_of_the_ledger(text: str) -> None:
    assert found(text) == []
