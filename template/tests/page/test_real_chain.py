"""The page on a real chain, in a real browser: `make test-page-chain`.

The lesson is played to its end, each button is pressed, and every number on the page is compared with what `outbox
check` and the tables say. Each fault leaves evidence that the page has no part in: a process, an offset, a row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from outbox.audit import check
from outbox.base import project
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole, load
from outbox.relay import lifecycle
from outbox_lab.stack.command import SinkProcess
from outbox_lab.stack.stack import Stack
from playwright.sync_api import Browser, Page, expect

from demo.page.actions import ACTIONS, BURST
from demo.page.lesson import QUESTIONS
from template.tests.page import real
from template.tests.page.conftest import WAIT_MS
from template.tests.page.made_up import NAIVE, RIGHT

STEP_MS = 300_000  # a step of the lesson, or an action, until everything agrees again

pytestmark = [pytest.mark.browser, pytest.mark.chain, pytest.mark.timeout(1800)]

Numbers = dict[str, Any]


# The chain and the page -------------------------------------------------------------------------------------------


@contextmanager
def opened(chromium: Browser, url: str) -> Iterator[Page]:
    """Open the page. Afterwards: it has reported no error."""
    context = chromium.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(url)
    yield page
    context.close()
    assert errors == []


@pytest.fixture(scope="module")
def page(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page on a chain that has just started."""
    log = tmp_path_factory.mktemp("real") / "log"
    with real.served(real.COMMAND, log) as demo, opened(chromium, demo.url) as page:
        expect(page.locator("[data-action=transfer]")).to_have_attribute("aria-disabled", "false", timeout=STEP_MS)
        yield page


@pytest.fixture(scope="module")
def settings(page: Page) -> Settings:
    """How to reach the chain of the page."""
    return load(real.HOME, environment=False)


# Numbers ----------------------------------------------------------------------------------------------------------


def shown(page: Page) -> Numbers:
    """The numbers that people read on the page."""
    found = page.evaluate(
        """() => {
          const number = (text) => Number(text.replace(/[^0-9]/g, ""));
          const text = (css) => document.querySelector(css).textContent;
          const [again, strangers] = text("#station-topics .note:last-child").split(",").map(number);
          const cards = [...document.querySelectorAll("#cards .card")].map((card) => [
            card.querySelector("h3").childNodes[1].textContent,
            {
              drift: number(card.querySelector(".figure").textContent),
              ...Object.fromEntries([...card.querySelectorAll("dl div")].map((one) => [
                one.querySelector("dt").textContent, number(one.querySelector("dd").textContent)])),
            },
          ]);
          return {
            transfers: number(text("#station-client .figure")),
            accounts: number(text("#station-client .note")),
            events: number(text("#station-outbox .figure")),
            again, strangers, ...Object.fromEntries(cards),
          };
        }"""
    )
    assert isinstance(found, dict)
    return found


def stored(settings: Settings) -> Numbers:
    """The page's numbers, from the tables, and from the topics, which `outbox check` reads record by record."""
    report = check.check(settings)
    source, sinks = SourceRole.OWNER, SinkRole.OWNER
    counts = rows(settings, sinks, "SELECT name, applied, duplicates FROM sinks")
    letters = dict(rows(settings, sinks, "SELECT sink, count(*) FROM dead_letters WHERE status = 'open' GROUP BY sink"))
    totals = dict(rows(settings, sinks, "SELECT sink, sum(abs(total))::bigint FROM sink_totals GROUP BY sink"))
    return {
        "transfers": one(settings, source, "SELECT count(*) FROM transfers"),
        "accounts": one(settings, source, "SELECT count(*) FROM accounts"),
        "events": one(settings, source, "SELECT count(*) FROM outbox"),
        "again": report.duplicates,
        "strangers": report.count("foreign-events") + report.count("malformed-records"),
        **{
            name: {
                "drift": int(report.sink(name).drift_total),
                "total": totals.get(name, 0),
                "applied": applied,
                "duplicates skipped": duplicates,
                "set aside": letters.get(name, 0),
            }
            for name, applied, duplicates in counts
            if name in (RIGHT, NAIVE)
        },
    }


def rows(settings: Settings, role: SourceRole | SinkRole, query: str) -> list[tuple[Any, ...]]:
    with closing(connect(settings, role)) as connection, connection.cursor() as cursor:
        cursor.execute(query)
        return cursor.fetchall()


def one(settings: Settings, role: SourceRole | SinkRole, query: str) -> int:
    [(found,)] = rows(settings, role, query)
    return int(found)


def agree(page: Page, settings: Settings) -> Numbers:
    """The page shows what is stored: at the latest with its next reading."""
    due = stored(settings)
    expect(page.locator("#station-outbox .figure")).to_contain_text(format(due["events"], ","))
    assert shown(page) == due
    return due


# Actions ----------------------------------------------------------------------------------------------------------


def settled(page: Page, name: str) -> None:
    """Press a button. The page says what happened and why, and then that everything agrees again."""
    pressed(page, name)
    sentence = page.locator("#said p").first
    expect(sentence).to_have_class("settled", timeout=STEP_MS)
    expect(sentence).to_contain_text(ACTIONS[name].label)


def pressed(page: Page, name: str) -> None:
    """Press a button, and wait until the page says what happened and why."""
    button = page.locator(f"[data-action={name}]")
    expect(button).to_have_attribute("aria-disabled", "false", timeout=STEP_MS)
    page.evaluate("() => document.querySelectorAll('#said p').forEach((one) => { one.dataset.old = 'yes'; })")
    button.click()
    said = page.locator("#said p:not([data-old])")
    expect(said.last).to_contain_text(ACTIONS[name].label, timeout=STEP_MS)
    assert said.last.get_attribute("class") == "done", said.last.text_content()


Evidence = Callable[[Settings], Any]


def part(name: str) -> Evidence:
    """The process of a part."""
    return lambda settings: Stack(settings).part(name).pid()


def sink_process(settings: Settings) -> int | None:
    return SinkProcess(f"sink-{RIGHT}-{NAIVE}", settings, ["sink", RIGHT, NAIVE]).pid()


def replication(settings: Settings) -> list[tuple[Any, ...]]:
    return rows(settings, SourceRole.OWNER, "SELECT active_pid FROM pg_replication_slots")


def generations(settings: Settings) -> list[tuple[Any, ...]]:
    return rows(settings, SinkRole.OWNER, "SELECT name, generation FROM sinks ORDER BY name")


def versions(settings: Settings) -> list[tuple[Any, ...]]:
    query = "SELECT DISTINCT schema_version FROM outbox WHERE aggregatetype = 'account' AND type = 'opened' ORDER BY 1"
    return rows(settings, SourceRole.OWNER, query)


def mode(settings: Settings) -> str:
    return lifecycle.status(settings).mode


def none(_settings: Settings) -> None:
    """The numbers are the evidence."""


# What each fault changes that the page has no part in.
CHANGES: Mapping[str, Evidence] = {
    "old-version": versions,
    "kill-worker": part("connect"),
    "cut": replication,
    "stop-kafka": part("kafka"),
    "start-kafka": part("kafka"),
    "exactly-once-off": mode,
    "exactly-once-on": mode,
    "crash-sinks": sink_process,
    "rewind-right": generations,
    "rewind-naive": generations,
}


@pytest.mark.parametrize("name", ACTIONS)
def test_each_button_does_its_action_and_the_page_shows_the_end(page: Page, settings: Settings, name: str) -> None:
    evidence = CHANGES.get(name, none)
    before, found = (stored(settings), evidence(settings)) if name != "start-kafka" else ({}, None)
    if name == "stop-kafka":
        pressed(page, name)
        assert evidence(settings) is None
        expect(page.locator("#station-topics .badge")).to_have_text("down", timeout=STEP_MS)
        return
    settled(page, name)
    assert name not in CHANGES or evidence(settings) != found
    after = agree(page, settings)
    assert after[RIGHT]["drift"] == 0
    EXPECTED.get(name, nothing_more)(before, after)


def nothing_more(_before: Numbers, _after: Numbers) -> None:
    """All has been said."""


def transferred(count: int) -> Callable[[Numbers, Numbers], None]:
    def holds(before: Numbers, after: Numbers) -> None:
        # The first action also opens the accounts of the page, and fills them.
        assert after["transfers"] - before["transfers"] >= count
        assert after[RIGHT]["applied"] - before[RIGHT]["applied"] >= 2 * count

    return holds


def set_aside(before: Numbers, after: Numbers) -> None:
    assert after["strangers"] == before["strangers"] + 1
    assert [after[name]["set aside"] - before[name]["set aside"] for name in (RIGHT, NAIVE)] == [1, 1]


def parted(before: Numbers, after: Numbers) -> None:
    assert after[RIGHT]["duplicates skipped"] - before[RIGHT]["duplicates skipped"] > 0
    assert after[NAIVE]["drift"] != before[NAIVE]["drift"]
    assert after["again"] == before["again"]  # the crash was behind Kafka


def skipped(before: Numbers, after: Numbers) -> None:
    assert after[RIGHT]["duplicates skipped"] - before[RIGHT]["duplicates skipped"] > BURST
    assert after[NAIVE] == before[NAIVE]


def doubled(before: Numbers, after: Numbers) -> None:
    assert after[NAIVE]["drift"] > before[NAIVE]["drift"]
    assert after[RIGHT] == before[RIGHT]


EXPECTED: Mapping[str, Callable[[Numbers, Numbers], None]] = {
    "transfer": transferred(1),
    "burst": transferred(BURST),
    "bad-record": set_aside,
    "crash-sinks": parted,
    "rewind-right": skipped,
    "rewind-naive": doubled,
}


RIGHT_OPTIONS = {1: 1, 2: 2, 3: 0, 4: 1, 5: 0}  # by question


# The lesson -------------------------------------------------------------------------------------------------------


def test_the_lesson_is_stepped_to_its_end(chromium: Browser, tmp_path: Path) -> None:
    command = ["-m", "outbox", "demo", "--stay", "--seed", str(real.SEED)]
    with real.served(command, tmp_path / "log") as demo, opened(chromium, demo.url) as page:
        page.get_by_role("button", name="Pause before the next step").click()
        for number, question in QUESTIONS.items():
            expect(page.locator(".kicker")).to_have_text(f"Question {number}", timeout=STEP_MS)
            page.get_by_role("button", name=question.options[RIGHT_OPTIONS[number]]).click()
            page.get_by_role("button", name="Do it").click(timeout=STEP_MS)
            expect(page.locator(f".answer[data-step='{number}']")).to_contain_text("You were right.", timeout=STEP_MS)
        expect(page.locator(".now-title")).to_have_text("The lesson is over", timeout=STEP_MS)
        settings = load(project.current().home / "demo", environment=False)
        due = agree(page, settings)
        phases = page.locator(".verdict tbody tr").evaluate_all("all => all.map((one) => one.innerText.split('\\t'))")
        numbers = [[int(cell.replace(",", "")) for cell in phase[1:]] for phase in phases]
        assert len(numbers) == len(QUESTIONS) - 1
        assert [sum(column) for column in zip(*numbers, strict=True)][:2] == [
            due["again"],
            due[RIGHT]["duplicates skipped"],
        ]
        assert [numbers[-1][2], numbers[-1][3]] == [due[RIGHT]["drift"], due[NAIVE]["drift"]]
        for cells in numbers:  # the terminal shows the same line
            assert re.search(r"\s+".join(map(str, cells)), demo.said())
        assert page.locator(".expect.broken").count() == 0
