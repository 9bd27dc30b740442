"""Most of the repository knows no sample: the ledger's words occur neither in the machinery and its tests, nor in what
runs, shows and watches any project. A name that the project chose stands in ``[tool.outbox]`` alone. And nothing that
people read uses an odd phrase.
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
    *("tests", ".github", ".ci", *FILES, "*.md"),
)


# Where a person reads prose: pages, comments, docstrings, names of tests, error texts.
READ = (*EVERYWHERE, "copier.yml", "docker-compose.*.yml", "examples", "proof", "pyproject.toml", "template")
READ_SUFFIXES = (*SUFFIXES, ".css", ".html", ".ini", ".j2", ".java", ".jinja", ".js", ".scala", ".sh")

PHRASES = re.compile(
    r"""\b(?:[Ii]s|[Aa]re)\ none\b   # `is None` is code
      | [Tt]aken\ for\b
      | \b[Bb]e\ it\b
      | \b[Ww]hoever\b
      | \bnone\ of\ its\ business\b""",
    re.VERBOSE,
)
TEST_NAME = re.compile(r"\btest_\w+")
LINE_BREAK = re.compile(r"[ \t]*\n[ \t]*(?:#|--|//|\*|>)?[ \t]*")  # with the mark of the next line of a comment


def files_of(place: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The text files of a folder, or the files that a pattern matches."""
    found = [file for file in (ROOT / place).rglob("*") if file.suffix in suffixes] or ROOT.glob(place)
    return sorted(file for file in found if file.is_file())


def found(text: str) -> list[str]:
    """The ledger's words in a text, each with its line."""
    lines = enumerate(OTHERS.sub("", text).splitlines(), 1)
    return [f"{number}: {line.strip()}" for number, line in lines if LEDGER.search(line)]


def odd(text: str) -> list[str]:
    """The odd phrases in a text, also those that a line break divides or that a test's name contains."""
    prose = TEST_NAME.sub(lambda name: name[0].replace("_", " "), text)
    return PHRASES.findall(LINE_BREAK.sub(" ", prose))


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
    assert found(f"scheduled.rebalance.max.delay.ms\n{text}") == [f"2: {text}"]


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


def test_nothing_that_people_read_has_an_odd_phrase() -> None:
    files = {file for place in READ for file in files_of(place, READ_SUFFIXES)} - {Path(__file__).resolve()}
    assert len(files) > 100
    wrong = [f"{file.relative_to(ROOT)}: {phrase}" for file in files for phrase in odd(file.read_text(errors="ignore"))]
    assert sorted(wrong) == []


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("None if there is none.", "is none"),
        ("# the records that are\n    # none", "are none"),
        ("def test_one_is_not_taken_for_the_other() -> None:", "taken for"),
        ("a batch, be it empty", "be it"),
        ("Whoever needs it", "Whoever"),
        ("what lies below is\nnone of its business", "is none"),
    ],
)
def test_an_odd_phrase_is_found(text: str, phrase: str) -> None:
    assert odd(text) == [phrase]
