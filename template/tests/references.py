"""References of a project's pages and comments, and those that lead nowhere.

A page may name a file that not every project has, if the same paragraph says so: "the larger sample", "with the
walkthrough", "with monitoring", "in the template's repository". A whole section may be about the larger sample; then
its heading or its first paragraph says so. A page may also name files that it lets the reader write: `PATH`:
"""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

LARGER = re.compile(r"larger\s+sample")
ELSEWHERE = re.compile(
    r"larger\s+sample|in\s+the\s+template's\s+repository|(?:with|of)\s+(?:the\s+walkthrough|monitoring)", re.IGNORECASE
)
FOLDERS = "bench|connect|demo|docs|examples|migrations|monitoring|outbox|service|sinks|tests"
PATH = rf"(?:{FOLDERS})/[\w./-]*[\w/]"
QUOTED = re.compile(rf"`+({PATH})((?:::\w+)*)`+")
BARE = re.compile(rf"(?<![\w./{{}}-])({PATH})((?:::\w+)*)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
MAKE = re.compile(r"`make ([a-z][\w-]*)")
WRITTEN = re.compile(r"^`([\w./-]+)`:$", re.MULTILINE)
PLACEHOLDER = re.compile(r"\b(NAME|AGGREGATE|PATH)\b")
HEADING = re.compile(r"(#+) +(.*)")
# Of the repository: the machinery with its sources, and the example that the guide is about.
PLACES = ("machinery", "machinery/src", "examples/shop")
COMMENTS = {".sql": "--", ".yml": "#", ".toml": "#", ".properties": "#", ".conf": "#", "": "#"}


class Reference(NamedTuple):
    """A file, a test, an anchor or a target that a page or a comment names."""

    line: int
    text: str
    is_elsewhere: bool = False  # the reader is told that not every project has it


def dead(project: Path, *, elsewhere: bool = False) -> list[str]:
    """References that lead nowhere, with their places. With ``elsewhere`` also those marked as elsewhere."""
    targets = _targets(project)
    found = []
    for file in _files(project):
        name = file.relative_to(project).as_posix()
        read = _in_page if file.suffix == ".md" else _in_comments
        for reference in read(file):
            if (elsewhere or not reference.is_elsewhere) and not _exists(project, file, reference.text, targets):
                found.append(f"{name}:{reference.line}: {reference.text}")
    return found


def _files(project: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(project):
        folders[:] = sorted(name for name in folders if not name.startswith(".") or name == ".github")
        for file in (Path(parent, name) for name in sorted(names)):
            if file.suffix in (".md", ".py", *COMMENTS) and file.name not in ("LICENSE", "java", "CHANGELOG.md"):
                yield file


def _targets(project: Path) -> set[str]:
    lines = [line for file in project.glob("*akefile") for line in file.read_text().splitlines()]
    return {name for line in lines if re.match(r"[\w%][\w% -]*:", line) for name in line.partition(":")[0].split()}


def _exists(project: Path, file: Path, text: str, targets: set[str]) -> bool:
    if text.startswith("make "):
        return text.removeprefix("make ") in targets
    if text.startswith("("):
        path, _, anchor = text[1:-1].partition("#")
        page = file.parent / path if path else file
        return page.exists() and (not anchor or anchor in _anchors(page))
    path, *names = text.split("::")
    found = [there for base in _bases(project, file) if (there := base / path).exists()]
    return bool(found) and (not names or set(names) <= _tests(found[0]))


def _bases(project: Path, file: Path) -> Iterator[Path]:
    """Folders at which a path in a file may begin: the project, or one of the projects in the template's repository."""
    yield from (folder for folder in file.parents if folder.is_relative_to(project))
    yield from (project / place for place in PLACES)


@cache
def _anchors(page: Path) -> set[str]:
    titles = [heading[2] for line in page.read_text().splitlines() if (heading := HEADING.match(line))]
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@cache
def _tests(file: Path) -> set[str]:
    return {
        node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def _in_page(page: Path) -> Iterator[Reference]:
    text = page.read_text()
    written = set(WRITTEN.findall(text))
    told: list[tuple[int, bool]] = []  # by level of heading, whether its section is about what is elsewhere
    is_first = False
    for line, paragraph in _paragraphs(text):
        heading = HEADING.match(paragraph)
        if heading:
            told = [one for one in told if one[0] < len(heading[1])]
            told.append((len(heading[1]), bool(LARGER.search(heading[2]))))
            is_first = True
        elif is_first:
            told[-1] = (told[-1][0], told[-1][1] or bool(LARGER.search(paragraph)))
            is_first = False
        is_elsewhere = any(is_told for _, is_told in told)
        for number, one in _pieces(line, paragraph):
            for reference in _named(one):
                if reference not in written:
                    yield Reference(number, reference, is_elsewhere or bool(ELSEWHERE.search(one)))


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Each with its first line; without blocks of code."""
    lines: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.strip() and not (line.startswith("    ") and not lines):
            lines.append(line)
        elif lines:
            yield number - len(lines), "\n".join(lines)
            lines = []


def _pieces(line: int, paragraph: str) -> Iterator[tuple[int, str]]:
    """A row of a table and an item of a list stand for themselves. A list that a sentence introduces belongs to it."""
    starts: list[tuple[int, str]] = []
    for number, one in enumerate(paragraph.splitlines(), line):
        if not starts or (one[:2] in ("| ", "- ") and paragraph.startswith(one[:2])):
            starts.append((number, one))
        else:
            starts[-1] = (starts[-1][0], f"{starts[-1][1]}\n{one}")
    return iter(starts)


def _named(text: str) -> Iterator[str]:
    for path, names in QUOTED.findall(text):
        if not PLACEHOLDER.search(path):
            yield f"{path}{names}"
    for target in MAKE.findall(text):
        yield f"make {target}"
    for link in LINK.findall(text):
        if "://" not in link:
            yield f"({link})"


def _in_comments(file: Path) -> Iterator[Reference]:
    for line, comment in _comments(file):
        for path, names in BARE.findall(comment):
            if not PLACEHOLDER.search(path):
                yield Reference(line, f"{path.rstrip('./')}{names}", bool(ELSEWHERE.search(comment)))


def _comments(file: Path) -> Iterator[tuple[int, str]]:
    text = file.read_text()
    if file.suffix != ".py":
        mark = COMMENTS[file.suffix]
        for number, line in enumerate(text.splitlines(), 1):
            found = re.search(rf"(?:^|\s){mark} (.*)", line)
            if found:
                yield number, found[1]
        return
    # To take Python apart takes long, and few files name another.
    if any(BARE.search(line.partition("#")[2]) for line in text.splitlines() if "#" in line):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)) if QUOTED.search(text) else ():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, " ".join(f"{path}{names}" for path, names in QUOTED.findall(docstring))
