"""The checkers of captured tables, on changes of rows written by hand: sound, and wrong in one way each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from outbox_lab.soak.history import History
from outbox_lab.soak.seen import Copy, RowChange, Seen
from outbox_lab.soak.sink_checkers import wrong_rows
from outbox_lab.soak.verdict import judge
from tests.support.soak_run import PLAN, SEEN, broken, record


def row(key: str, pieces: int, version: int) -> dict[str, Any]:
    return {"id": key, "pieces": pieces, "version": version}


def moved(key: str, lsn: int, pieces: int, version: int, op: str = "u") -> RowChange:
    """A change of a row, at the offset of the same number."""
    return RowChange("items", 0, lsn, "items", key, lsn, op, {**row(key, pieces, version), "label": "not compared"})


def deleted(key: str, lsn: int) -> RowChange:
    return RowChange("items", 0, lsn, "items", key, lsn, "d")


# A snapshot has row a, whose place is above that of a change which was open then. Row c was deleted.
SNAPSHOT = moved("a", 30, 5, 1, "r")
MOVES = (
    replace(SNAPSHOT, offset=0),
    moved("a", 20, 7, 2),
    moved("b", 21, 0, 0, "c"),
    moved("c", 22, 0, 0, "c"),
    moved("b", 23, 4, 1),
    deleted("c", 24),
    moved("b", 25, 4, 1),  # another column, which raises no version
    moved("b", 26, 9, 2),
)
TABLE = (row("a", 7, 2), row("b", 9, 2))
WITH_C = (*TABLE, row("c", 3, 1))
RENAMED = tuple({"id": one["id"], "version": one["version"], "parts": one["pieces"]} for one in TABLE)
COPY = Copy("copy", "items", "id", "version", TABLE, TABLE)
CAPTURED = Seen(row_changes=MOVES, copies=[COPY])
LAST, REPEATED_ROW, ONCE, SPREAD, BORN, ORDER, GAPS = (
    "the last change of a row is on its topic",
    "a repeated change of a row is the same change",
    "with exactly-once a change of a row is on its topic once",
    "the changes of a row are on one partition",
    "a row is created once, before its other changes, or is a snapshot's",
    "the changes of a row are in the order of the log",
    "the versions of a row have no gap",
)


def promises(seen: Seen, *, exactly_once: bool = True) -> dict[str, int]:
    """The promises that do not hold, with the number of cases."""
    return broken(record(seen, History(), replace(PLAN, exactly_once=exactly_once)))


def with_changes(*changes: RowChange, **changed: Any) -> Seen:
    return replace(CAPTURED, row_changes=changes, **changed)


def with_rows(*rows: Mapping[str, Any]) -> Seen:
    """The captured state, with other rows in the sink."""
    return replace(CAPTURED, copies=[replace(COPY, rows=rows)])


def beginning_again(table: Sequence[Mapping[str, Any]], *again: RowChange) -> Seen:
    """The captured state, and then changes that lead to this table."""
    return with_changes(*MOVES, *again, copies=[replace(COPY, source=table, rows=table)])


SOUND = {
    "nothing": Seen(),
    "everything": CAPTURED,
    "an empty table": Seen(copies=[Copy("copy", "items", "id")]),
    "a snapshot passes over changes": beginning_again(
        (row("a", 91, 10), TABLE[1]), moved("a", 50, 90, 9, "r"), moved("a", 51, 91, 10)
    ),
    "a row is created again": beginning_again(WITH_C, moved("c", 50, 0, 0, "c"), moved("c", 51, 3, 1)),
    "no column counts changes": with_changes(*MOVES[:4], MOVES[5], MOVES[7], copies=[replace(COPY, version=None)]),
}


@pytest.mark.parametrize("seen", SOUND.values(), ids=SOUND)
def test_captured_tables_that_are_empty_or_sound(seen: Seen) -> None:
    assert promises(seen) == promises(seen, exactly_once=False) == {}


@pytest.mark.parametrize(
    ("rows", "cases"),
    [
        (TABLE[:1], ["b: the sink has no such row"]),
        ((), ["a: the sink has no such row", "b: the sink has no such row"]),
        ((*TABLE, row("c", 0, 0)), ["c: the source has no such row"]),  # it was deleted
        ((*TABLE, TABLE[0]), ["a: 2 rows instead of 1"]),
        ((TABLE[0], row("b", 8, 2)), ["b: pieces is 8 and must be 9"]),
        ((TABLE[0], row("b", 4, 1)), ["b: pieces is 4 and must be 9, version is 1 and must be 2"]),
        ((TABLE[0], {"id": "b", "version": 2}), ["b: pieces is None and must be 9"]),
        ((row("a", 9, 2), row("b", 7, 2)), ["a: pieces is 9 and must be 7", "b: pieces is 7 and must be 9"]),
        ((TABLE[0], {**TABLE[1], "pieces": "9"}), ["b: pieces is 9 and must be 9"]),  # a text, and a number
        (tuple(dict(reversed(one.items())) for one in reversed(TABLE)), []),  # no order is a difference
    ],
)
def test_a_row_that_differs_from_the_source_is_found(rows: Any, cases: list[str]) -> None:
    assert sorted(wrong_rows(replace(COPY, rows=rows))) == cases
    assert promises(with_rows(*rows)) == ({"copy has the rows of its table": len(cases)} if cases else {})


@pytest.mark.parametrize(
    ("found", "seen"),
    {
        "the last change is lost": ({LAST: 1}, with_changes(*MOVES[:-1])),
        "a row never came": ({LAST: 1}, with_changes(*(one for one in MOVES if one.key != "b"))),
        "nothing came": ({LAST: 2}, with_changes()),
        "a deletion is lost": ({LAST: 1}, with_changes(*MOVES[:5], *MOVES[6:])),
        "a row of nobody": ({LAST: 1}, with_changes(*MOVES, moved("z", 40, 1, 1, "c"))),
        "a row is deleted, and the source has it": ({LAST: 1}, with_changes(*MOVES, deleted("b", 40))),
        "a value that the source has not": (
            {LAST: 1},
            with_changes(*MOVES[:-1], replace(MOVES[-1], row=row("b", 8, 2))),
        ),
        "a change between two others is lost": ({GAPS: 1}, with_changes(*MOVES[:4], MOVES[5], MOVES[7])),
        "the first change after a snapshot is lost": (
            {GAPS: 1, LAST: 1},
            with_changes(MOVES[0], replace(MOVES[1], row=row("a", 8, 3)), *MOVES[2:]),
        ),
        "a version goes back": ({GAPS: 1, LAST: 1}, with_changes(*MOVES, moved("b", 40, 9, 1))),
        "a creation is lost": ({BORN: 1}, with_changes(*MOVES[:2], *MOVES[3:])),
        "a creation behind a deletion is lost": (
            {BORN: 1},
            with_changes(*MOVES, moved("c", 41, 3, 1), copies=[replace(COPY, source=WITH_C, rows=WITH_C)]),
        ),
        "a deletion before another creation is lost": ({BORN: 1}, with_changes(*MOVES, moved("b", 41, 9, 2, "c"))),
        "a column that the topic has not": (
            {LAST: 2},
            with_changes(*MOVES, copies=[replace(COPY, source=RENAMED, rows=RENAMED)]),
        ),
        "a change twice, behind a block that is explained": (
            {ONCE: 2},
            with_changes(
                *MOVES,
                *(replace(one, offset=one.offset + 40) for one in MOVES[5:]),
                replace(MOVES[-1], offset=80),
                released={"items": 1},
            ),
        ),
        "only a deletion came": ({BORN: 1}, with_changes(*MOVES, deleted("z", 40))),
        "two changes in the wrong order": (
            {ORDER: 1, GAPS: 1, LAST: 1},
            with_changes(*MOVES[:4], *MOVES[5:7], MOVES[7], MOVES[4]),
        ),
        "two changes at one place of the log": (
            {ORDER: 1, BORN: 1},
            with_changes(*MOVES[:-1], replace(MOVES[-1], lsn=25, op="c")),
        ),
        "two partitions": ({SPREAD: 1}, with_changes(*MOVES[:-1], replace(MOVES[-1], partition=1))),
        "a change twice": ({ONCE: 1}, with_changes(*MOVES, replace(MOVES[-1], offset=40))),
        "a change twice, by another connector's transaction": (
            {ONCE: 1},
            with_changes(*MOVES, replace(MOVES[-1], offset=40), released={"orders": 1, "others": 1}),
        ),
        "a repeat with other values": (
            {REPEATED_ROW: 1},
            with_changes(*MOVES, replace(MOVES[-1], offset=40, row=row("b", 8, 2)), released={"items": 1}),
        ),
        "a repeat in another partition": (
            {REPEATED_ROW: 1},
            with_changes(*MOVES, replace(MOVES[-1], offset=40, partition=1), released={"items": 1}),
        ),
    }.values(),
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_a_captured_table_whose_changes_are_wrong(found: dict[str, int], seen: Seen) -> None:
    assert promises(seen) == found


def test_repeated_row_change_needs_at_least_once_or_a_release() -> None:
    block = [replace(one, offset=one.offset + 40) for one in MOVES[3:]]
    assert judge(record(with_changes(*MOVES, *block))).repeats == len(block)
    assert not promises(with_changes(*MOVES, *block), exactly_once=False)
    assert not promises(with_changes(*MOVES, *block, released={"items": 1}))
    assert promises(with_changes(*MOVES, *block)) == {ONCE: 1}


def test_captured_tables_are_judged_with_everything_else() -> None:
    verdict = judge(record(replace(SEEN, row_changes=MOVES, copies=[COPY])))
    assert (verdict.result, verdict.row_changes, verdict.repeats) == ("valid", len(MOVES), 0)
