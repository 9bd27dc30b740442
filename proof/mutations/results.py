"""The recorded results: results.json, and their part of docs/mutations.md. `--write` writes both."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from proof.mutations.mutation import ROOT, Mutation, every
from proof.mutations.trial import Trial, Verdict

FILE = Path(__file__).with_name("results.json")
DOCUMENT = ROOT / "docs" / "mutations.md"
BEGIN, END = "<!-- proof.mutations writes this part -->", "<!-- to here -->"


@dataclass(frozen=True)
class Result:
    """The result of one mutation's tests. ``of`` tells whether the mutation is still the same."""

    name: str
    of: str
    verdict: Verdict
    why: str
    seconds: int
    date: str

    @classmethod
    def from_trial(cls, mutation: Mutation, found: Trial) -> Result:
        """Of a trial that has just ended."""
        today = datetime.now(UTC).date().isoformat()
        return cls(mutation.name, digest(mutation), found.verdict, found.why, round(found.seconds), today)


def digest(mutation: Mutation) -> str:
    """Names the mistake and the tests that must notice it; the text around it may change, and the file may move."""
    parts = msgspec.json.encode([mutation.suite, Path(mutation.file).name, mutation.new, mutation.tests])
    return hashlib.sha256(parts).hexdigest()[:12]


def load(mutations: Sequence[Mutation] | None = None) -> dict[str, Result]:
    """By name, the recorded results of these mutations, or of all. A mutation that was changed has none."""
    recorded = msgspec.json.decode(FILE.read_bytes(), type=list[Result]) if FILE.exists() else []
    current = {one.name: digest(one) for one in (every() if mutations is None else mutations)}
    return {one.name: one for one in recorded if current.get(one.name) == one.of}


def write(new: Sequence[Result] = ()) -> None:
    """Record results, in the order of the mutations, and write the document."""
    recorded = load() | {one.name: one for one in new}
    kept = [recorded[one.name] for one in every() if one.name in recorded]
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    DOCUMENT.write_text(document(every(), recorded))


def document(mutations: Sequence[Mutation], recorded: dict[str, Result]) -> str:
    """The document with these results."""
    pattern = re.compile(f"({re.escape(BEGIN)}\n).*?({re.escape(END)}\n)", re.DOTALL)
    part = "\n".join(render(mutations, recorded))
    return pattern.sub(lambda found: f"{found[1]}{part}\n{found[2]}", DOCUMENT.read_text())


def render(mutations: Sequence[Mutation], recorded: dict[str, Result]) -> Iterator[str]:
    """Lines: how many were caught, and for each mutation the test that noticed it."""
    tried = [recorded[one.name] for one in mutations if one.name in recorded]
    caught = [one for one in tried if one.verdict == "caught"]
    yield f"{len(mutations)} mutations: {len(tried)} were tried, {len(caught)} were caught{_when(tried)}."
    yield ""
    yield "| mutation | verdict | seconds | test |"
    yield "|---|---|---:|---|"
    for one in mutations:
        found = recorded.get(one.name)
        if found is None:
            yield f"| {one.name} | not tried | | |"
        else:
            yield f"| {one.name} | {found.verdict} | {found.seconds or ''} | {_test(one, found)} |"
    yield ""


def _when(tried: Sequence[Result]) -> str:
    dates = sorted({one.date for one in tried})
    return f", between {dates[0]} and {dates[-1]}" if len(dates) > 1 else "".join(f", on {date}" for date in dates)


def _test(mutation: Mutation, found: Result) -> str:
    """The test that noticed the mutation, from the repository's root, without the values of its parameters."""
    if found.verdict != "caught":
        return ""
    folder = "" if mutation.suite == "." else f"{mutation.suite}/"
    return next((f"`{folder}{test}`" for test in mutation.tests if found.why.startswith(test)), "")
