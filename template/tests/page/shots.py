"""The two pictures of the page: `python -m template.tests.page.shots [URL]` writes them to docs/.

The URL is the one that `make demo` prints. The pictures show the end of its lesson, and what was seen since this
command began. Without a URL the made-up chain is shown.
"""

from __future__ import annotations

import sys

from playwright.sync_api import Browser, expect, sync_playwright

from template.tests.page.conftest import MISSING, WAIT_MS, arguments, executable
from template.tests.page.made_up import Stage
from template.tests.paths import ROOT

LESSON_MS = 900_000
PICTURES = (("page.png", 1440, 900, "light"), ("page-phone.png", 390, 844, "dark"))


def take(browser: Browser, url: str, *, is_real: bool) -> None:
    """Open the page in each size, and write a picture of its first screen."""
    pages = {}
    for name, width, height, scheme in PICTURES:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
            device_scale_factor=2 if width < 500 else 1,
            reduced_motion="reduce",
        )
        context.set_default_timeout(WAIT_MS)
        page = pages[name] = context.new_page()
        page.goto(url)
        page.locator("#rows tr").first.wait_for(timeout=LESSON_MS)
    for name, page in pages.items():
        if is_real:
            expect(page.locator(".now-title")).to_have_text("The lesson is over", timeout=LESSON_MS)
            expect(page.locator("#cards .badge").first).to_have_text("agrees with the ledger")
        page.screenshot(path=ROOT / "docs" / name)


def main() -> None:
    """Take them."""
    found = executable()
    if found is None:
        sys.exit(f"shots: {MISSING}")
    stage = None if sys.argv[1:] else Stage()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=arguments())
        take(browser, sys.argv[1] if stage is None else stage.url, is_real=stage is None)
        browser.close()
    if stage is not None:
        stage.close()


if __name__ == "__main__":
    main()
