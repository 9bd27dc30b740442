"""A Chromium of this machine, and the page on a made-up chain."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from template.tests.page.made_up import Stage

AXE = Path(__file__).parent / "axe" / "axe.min.js"
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OWN = Path(__file__).parents[3] / ".outbox" / "chromium" / "chromium"
MISSING = "no Chromium: `make chromium` gets one without root, or name one in the variable CHROMIUM"
WAIT_MS = 60_000  # a browser on a busy machine


def executable() -> str | None:
    """The Chromium to use: of the variable CHROMIUM, the first on the path, or that of `make chromium`."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, (*NAMES, str(OWN)))), None)


def arguments() -> list[str]:
    """Chromium refuses to run as root with its sandbox. It opens our own page only."""
    return ["--no-sandbox"] if os.geteuid() == 0 else []


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """A headless browser. Without one the test is skipped, in CI it fails."""
    found = executable()
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=arguments())
        yield browser
        browser.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    """The page on a made-up chain."""
    made = Stage()
    yield made
    made.close()


@pytest.fixture
def context(chromium: Browser) -> Iterator[BrowserContext]:
    """A browser without history."""
    made = chromium.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    made.set_default_timeout(WAIT_MS)
    yield made
    made.close()


@pytest.fixture
def page(context: BrowserContext, stage: Stage) -> Iterator[Page]:
    """The open page. Afterwards: it has reported no error."""
    errors: list[str] = []
    opened = context.new_page()
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    opened.goto(stage.url)
    opened.locator("#link.live").wait_for()
    opened.locator("#rows tr").first.wait_for()
    yield opened
    assert errors == []
