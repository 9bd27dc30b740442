"""The table of the experiments: on a terminal, and as Markdown in docs/experiments.md."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from proof.articles.experiment import Row

BEGIN, END = "<!-- experiments: begin -->", "<!-- experiments: end -->"
NOT_RUN = "Not run in this size yet: "
HEADER = ("experiment", "what is done", "expected", "seen", "verdict")
WIDTH = 100
CELL = re.compile(r"(?<!\\)\|")


def as_text(rows: Sequence[Row]) -> str:
    """The rows one below the other, as a terminal is too narrow for five columns."""
    return "\n".join(line for row in rows for line in _paragraph(row))


def _paragraph(row: Row) -> Iterator[str]:
    yield row.name
    texts = {"done": row.done, "expected": row.expected, "seen": row.seen, "verdict": row.verdict}
    for name, text in texts.items():
        yield from textwrap.wrap(text, WIDTH, initial_indent=f"  {name:9}", subsequent_indent=" " * 11)


def as_markdown(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [HEADER, tuple("---" for _ in HEADER), *rows]
    return "".join(f"| {' | '.join(map(_escaped, line))} |\n" for line in lines)


def in_page(page: str) -> list[Row]:
    """The rows of the table between the two comments of a page."""
    lines = [line for line in _between(page)[1].splitlines() if line.startswith("| ")]
    return [Row(*_cells(line)) for line in lines[2:]]


def write(page: str, rows: Sequence[Row], order: Sequence[str], note: str) -> str:
    """The page with these rows in its table, and the note below. Rows of experiments that have not run stay.

    Rows of experiments that are not in ``order`` go.
    """
    known = {row.name: row for row in [*in_page(page), *rows]}
    before, _, after = _between(page)
    table = as_markdown([known[name] for name in order if name in known])
    missing = [name for name in order if name not in known]
    gaps = f"{NOT_RUN}{', '.join(missing)}\n\n" if missing else ""
    return f"{before}{BEGIN}\n\n{table}\n{gaps}{note}\n\n{END}{after}"


def not_run(page: str) -> list[str]:
    """The experiments that the page names as not run yet."""
    lines = _between(page)[1].splitlines()
    return [name for line in lines if line.startswith(NOT_RUN) for name in line.removeprefix(NOT_RUN).split(", ")]


def _between(page: str) -> tuple[str, str, str]:
    """The page before, between and behind the comments. Raises ValueError if it does not have both once."""
    before, begin, rest = page.partition(BEGIN)
    between, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in after:
        raise ValueError(f"the page must have {BEGIN} and {END} once each, in this order")
    return before, between, after


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def _cells(line: str) -> list[str]:
    return [cell.strip().replace(r"\|", "|") for cell in CELL.split(line.strip())[1:-1]]
