"""The page in a real browser, on a made-up chain: what it shows, how it is used, and that it comes back."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from demo.page.actions import ACTIONS, HOSTILE
from demo.page.lesson import QUESTIONS
from template.tests.page.conftest import AXE, WAIT_MS
from template.tests.page.made_up import NAIVE, RIGHT, TITLES, Stage, lesson

PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1440, "height": 900}

pytestmark = pytest.mark.browser
expect.set_options(timeout=WAIT_MS)


# What it shows ----------------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_chain(page: Page, stage: Stage) -> None:
    for name in (RIGHT, NAIVE):
        card = page.locator(".card", has=page.get_by_role("heading", name=name, exact=False)).filter(has_text=name)
        drift = format(stage.state.summary[name]["drift"], ",")
        expect(card.last if name == NAIVE else card.first).to_contain_text(drift)
    stage.advance()
    expect(page.locator("#station-client .figure")).to_contain_text(str(stage.model.transfers))


def test_the_moment_at_which_the_sinks_part_is_on_the_plot(page: Page) -> None:
    expect(page.locator("#marks .part").first).to_contain_text("part:")
    expect(page.locator("#marks .part").last).to_contain_text("further apart:")
    assert page.locator("#plot .moment.part").count() == 2
    assert "Drift" in str(page.locator("#plot svg").get_attribute("aria-label"))


def test_a_part_that_is_down_is_shown_as_down_and_comes_back(page: Page, stage: Stage) -> None:
    stage.model.down = {"topics", "connect"}
    stage.read()
    for station in ("topics", "connect"):
        expect(page.locator(f"#station-{station} .badge")).to_have_text("down")
    stage.model.down = set()
    stage.read()
    expect(page.locator("#station-connect .badge")).to_have_text("task runs")


def test_a_hostile_payload_is_shown_as_text(page: Page) -> None:
    page.locator("#rows button", has_text="not an event of ours").first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator("pre").last).to_have_text(HOSTILE)
    assert dialog.locator("img, script").count() == 0
    assert page.title() == "The outbox chain, live"


def test_an_event_is_followed_through_every_hop(page: Page) -> None:
    page.locator("#rows button", has_text="balance.credited").first.click()
    hops = page.get_by_role("dialog").locator(".hops li")
    expect(hops).to_have_count(5)  # outbox, topic, and three sinks
    expect(hops.first).to_contain_text("write-ahead log")
    expect(hops.nth(1)).to_contain_text("offset")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


# How it is used ---------------------------------------------------------------------------------------------------


def test_each_button_asks_for_its_action(page: Page, stage: Stage) -> None:
    for name, action in ACTIONS.items():
        if name == "exactly-once-on":  # it is on
            stage.model.mode = "at-least-once"
            stage.read()
        button = page.locator(f"[data-action={name}]")
        expect(button).to_have_attribute("aria-disabled", "false")
        with page.expect_response("**/api/act") as response:
            button.click()
        assert response.value.ok
        assert stage.desk.asked == [action.label]
        stage.desk.asked.clear()


def test_no_button_works_while_something_is_done(page: Page, stage: Stage) -> None:
    part = stage.hub.part("stage")
    stage.hub.publish({"stage": {**part, "busy": ACTIONS["burst"].label}})
    expect(page.locator("[data-action=burst].busy")).to_have_count(1)
    page.locator("[data-action=transfer]").click(force=True)
    stage.hub.publish({"stage": part})
    expect(page.locator("[data-action=burst].busy")).to_have_count(0)
    assert stage.desk.asked == []


def test_the_lesson_asks_then_explains(page: Page, stage: Stage) -> None:
    question = QUESTIONS[4]
    page.get_by_role("button", name=question.options[0]).click()
    expect(page.get_by_role("button", name=question.options[0])).to_have_attribute("aria-pressed", "true")
    with page.expect_response("**/api/lesson"):
        page.get_by_role("button", name="Do it").click()
    stage.hub.publish({"lesson": lesson("played", 4, paused=True)})
    expect(page.locator(".answer")).to_contain_text("Not quite.")
    expect(page.locator(".answer")).to_contain_text("604")
    expect(page.locator(".option.right")).to_contain_text(question.options[1])
    assert stage.desk.asked == ["step"]


def test_a_request_that_is_refused_is_said(context: BrowserContext, stage: Stage) -> None:
    page = context.new_page()  # the browser reports it as an error
    page.goto(stage.url)
    button = page.locator("[data-action=transfer]")
    expect(button).to_have_attribute("aria-disabled", "false")
    stage.desk.is_free = False
    button.click()
    expect(page.locator("#notice")).to_contain_text("something else is being done")
    stage.desk.is_free = True
    button.click()
    expect(page.locator("#notice")).to_be_empty()


def test_a_dot_opens_its_event_also_if_it_is_drawn_again_meanwhile(page: Page, stage: Stage) -> None:
    page.locator("#station-outbox .mark").first.hover()
    page.mouse.down()
    stage.advance()
    expect(page.locator("#station-client .figure")).to_contain_text(str(stage.model.transfers))
    page.mouse.up()
    expect(page.get_by_role("dialog")).to_have_count(1)
    expect(page.locator("#station-outbox .mark.followed")).to_have_count(1)
    stage.advance()
    expect(page.locator("#station-client .figure")).to_contain_text(str(stage.model.transfers))
    expect(page.locator("#station-outbox .mark.followed")).to_have_count(1)


def test_nothing_is_green_before_all_has_come(page: Page, stage: Stage) -> None:
    def show(**changes: object) -> None:
        sinks = [{**one, "drift": 0, "pending": 0, **changes} for one in stage.hub.part("sinks")["sinks"]]
        stage.hub.publish({"sinks": {"sinks": sinks[:1]}})

    badge = page.locator(".card .badge").first
    show(pending=3)
    expect(badge).to_have_text("3 accounts in flight")
    expect(badge).not_to_have_class("badge good")
    show(compared=False)
    expect(badge).to_have_text("not compared yet")
    show(compared=True)
    expect(badge).to_have_class("badge good")


def test_a_lesson_that_is_over_can_be_played_again(page: Page, stage: Stage) -> None:
    stage.hub.publish({"lesson": lesson("over", len(TITLES) - 1, paused=False)})
    with page.expect_response("**/api/lesson"):
        page.get_by_role("button", name="Play the lesson step by step").click()
    expect(page.locator(".verdict tbody tr")).to_have_count(4)
    assert stage.desk.asked == ["play"]


def test_it_works_by_keyboard_alone(page: Page, stage: Stage) -> None:
    page.keyboard.press("Tab")
    assert focused(page)["text"] == "Skip to the lesson"
    page.keyboard.press("Enter")
    seen = []
    for _ in range(80):
        page.keyboard.press("Tab")
        here = focused(page)
        assert here["outline"] != "none", here
        seen.append(here["text"])
        if here["text"].startswith("balance."):
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_have_count(1)
    page.keyboard.press("Escape")
    assert focused(page)["text"] == seen[-1]  # the focus is back
    assert stage.desk.asked == []


def focused(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate(
        """() => {
          const one = document.activeElement;
          const ring = getComputedStyle(one.matches("input") ? one.nextElementSibling : one);
          return { text: one.textContent.trim(), outline: ring.outlineStyle };
        }"""
    )
    return found


# It is for everybody ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_axe_finds_no_barrier(chromium: Browser, stage: Stage, size: Any, scheme: Any) -> None:
    context = chromium.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    context.set_default_timeout(WAIT_MS)
    context.add_init_script(path=AXE)
    page = context.new_page()
    page.goto(stage.url)
    page.locator("#rows tr").first.wait_for()
    assert barriers(page) == []
    page.locator("#rows button").first.click()
    page.get_by_role("dialog").locator("pre").first.wait_for()
    assert barriers(page) == []
    context.close()


def barriers(page: Page) -> list[str]:
    """Findings of axe: rule, and the first element."""
    found = page.evaluate("async () => (await axe.run()).violations")
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]} {one['nodes'][0]['failureSummary']}" for one in found]


def test_nothing_is_cut_off_on_a_phone(chromium: Browser, stage: Stage) -> None:
    context = chromium.new_context(viewport={"width": 360, "height": 740})
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    page.goto(stage.url)
    page.locator("#rows tr").first.wait_for()
    assert page.evaluate("() => document.documentElement.scrollWidth") == 360
    context.close()


# It comes back ----------------------------------------------------------------------------------------------------


def test_it_reconnects_after_the_server_has_restarted(context: BrowserContext, stage: Stage) -> None:
    page = context.new_page()  # the browser reports requests without an answer as errors
    page.goto(stage.url)
    page.locator("#rows tr").first.wait_for()
    restarted = stage.restarted()
    try:
        expect(page.locator("#link")).to_have_class("link live")
        for _ in range(3):
            restarted.advance()
        expect(page.locator("#station-client .figure")).to_contain_text(str(restarted.model.transfers))
    finally:
        restarted.close()


def test_tabs_share_one_stream(page: Page, context: BrowserContext, stage: Stage) -> None:
    others = [context.new_page() for _ in range(7)]  # more than a browser's six connections to a host
    for other in others:
        other.goto(stage.url)
        other.locator("#rows tr").first.wait_for()
    assert stage.hub.subscribers == 1
    stage.advance()
    for other in others:
        expect(other.locator("#station-client .figure")).to_contain_text(str(stage.model.transfers))


def test_without_the_token_it_says_where_to_find_it(context: BrowserContext, stage: Stage) -> None:
    page = context.new_page()
    page.goto(stage.url.partition("#")[0])
    expect(page.locator("#link")).to_contain_text("the terminal shows")


def test_a_tab_keeps_its_token_and_takes_that_of_another_start(context: BrowserContext, stage: Stage) -> None:
    page = context.new_page()
    page.goto(stage.url)
    page.locator("#link.live").wait_for()
    page.reload()
    page.locator("#link.live").wait_for()
    page.goto(stage.url.partition("#")[0] + "#token=other")
    expect(page.locator("#link")).to_contain_text("the terminal shows")
