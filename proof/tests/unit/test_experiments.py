"""The articles' experiments: how deliveries are counted, the table, and the page that has its rows."""

from __future__ import annotations

import pytest

from proof.articles import table
from proof.articles.__main__ import EXPERIMENTS, PAGE
from proof.articles.experiment import AS_EXPECTED, NO_VERDICT, NOT_AS_EXPECTED, Experiment, NotFired, Report, Row, Seen
from proof.articles.history import Delivery, compare

ROW = Row("one", "`a` | b", "nothing lost", "5 records", AS_EXPECTED)
PAGE_OF_ONE = f"# Page\n\n{table.BEGIN}\n\n{table.as_markdown([ROW])}\nold note\n\n{table.END}\n\nmore\n"


@pytest.mark.parametrize(
    ("written", "read", "expected"),
    [
        ("abc", "abc", Delivery(3, 3, lost=0, duplicates=0, unexpected=0)),
        ("abc", "cba", Delivery(3, 3, lost=0, duplicates=0, unexpected=0)),
        ("abc", "ababc", Delivery(3, 5, lost=0, duplicates=2, unexpected=0)),
        ("abc", "aaaabc", Delivery(3, 6, lost=0, duplicates=3, unexpected=0)),
        ("abc", "ac", Delivery(3, 2, lost=1, duplicates=0, unexpected=0)),
        ("abc", "aac", Delivery(3, 3, lost=1, duplicates=1, unexpected=0)),
        ("abc", "abcdd", Delivery(3, 5, lost=0, duplicates=1, unexpected=2)),
        ("", "", Delivery(0, 0, lost=0, duplicates=0, unexpected=0)),
    ],
)
def test_a_history_is_counted(written: str, read: str, expected: Delivery) -> None:
    assert compare(written, read) == expected


@pytest.mark.parametrize(
    ("written", "read", "complete", "exactly_once"),
    [
        ("abc", "abc", True, True),
        ("abc", "abcb", True, False),
        ("abc", "aab", False, False),
        ("abc", "abcd", False, False),
        ("", "", False, False),
    ],
)
def test_a_history_is_judged(written: str, read: str, complete: bool, exactly_once: bool) -> None:
    delivery = compare(written, read)
    assert (delivery.is_complete, delivery.is_exactly_once) == (complete, exactly_once)


def experiment(seen: Seen | Exception) -> Experiment:
    def run(events: int, report: Report) -> Seen:
        report(f"{events} events")
        if isinstance(seen, Exception):
            raise seen
        return seen

    return Experiment("one", "{events} commits", "nothing lost", 50_000, run)


@pytest.mark.parametrize(
    ("seen", "verdict"),
    [
        (Seen("none lost", True), AS_EXPECTED),
        (Seen("one lost", False), NOT_AS_EXPECTED),
        (NotFired("it did not run"), NO_VERDICT),
        (TimeoutError("too late"), NO_VERDICT),
    ],
)
def test_only_an_expected_result_is_as_expected(seen: Seen | Exception, verdict: str) -> None:
    assert experiment(seen).result(lambda _: None).verdict == verdict


def test_fewer_events_can_be_asked_for_and_not_more() -> None:
    reported: list[str] = []
    one = experiment(Seen("", True))
    assert [one.result(reported.append, number).done for number in (None, 1_000, 10**6)] == [
        "50,000 commits",
        "1,000 commits",
        "50,000 commits",
    ]
    assert reported == ["50000 events", "1000 events", "50000 events"]


def test_the_table_of_a_page_is_read_as_it_was_written() -> None:
    assert table.in_page(PAGE_OF_ONE) == [ROW]


def test_rows_that_did_not_run_stay_and_unknown_ones_go() -> None:
    other = ROW._replace(name="two")
    page = table.write(PAGE_OF_ONE, [other], ["two", "one"], "new note")
    assert table.in_page(page) == [other, ROW]
    assert page.startswith("# Page\n")
    assert page.endswith("\n\nmore\n")
    assert ("new note" in page, "old note" in page) == (True, False)
    assert table.in_page(table.write(page, [], ["two"], "")) == [other]
    assert (table.not_run(page), table.not_run(table.write(page, [], ["three", "two"], ""))) == ([], ["three"])


@pytest.mark.parametrize("page", ["", table.BEGIN, table.END + table.BEGIN, (table.BEGIN + table.END) * 2])
def test_a_page_without_the_comments_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        table.write(page, [ROW], ["one"], "")


def test_page_names_each_experiment_and_all_ran_as_expected() -> None:
    page = PAGE.read_text()
    rows, missing = table.in_page(page), table.not_run(page)
    assert [row[:3] for row in rows] == [one.planned()[:3] for one in EXPERIMENTS if one.name not in missing]
    assert {row.verdict for row in rows} == {AS_EXPECTED}
    assert all(row.seen for row in rows)
