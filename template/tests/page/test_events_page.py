"""The page of `outbox events export --html` in a browser: it stands alone, runs nothing, and anybody can read it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from outbox.base.project import Project
from outbox.events import catalog
from outbox.sink.spec import SinkJob
from outbox_lab.events import page
from outbox_lab.events.consumers import Consumers
from playwright.sync_api import Browser

from template.tests.page.conftest import AXE, WAIT_MS
from template.tests.page.test_browser import barriers
from template.tests.paths import ROOT

pytestmark = pytest.mark.browser

HOSTILE = (
    "</pre></style></title><script>document.title = 'taken'</script><img src=http://127.0.0.1:1/x onerror=alert(1)>"
)
PHONE, DESK = {"width": 360, "height": 740}, {"width": 1280, "height": 900}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The page of the ledger's events, with an event whose declaration and sink try to break out of it."""
    events = Path(shutil.copytree(ROOT / "connect" / "events", tmp_path / "events"))
    hostile = events / "hostile"
    hostile.mkdir()
    (hostile / "aggregate.toml").write_text('key = "id"\n')
    schema: dict[str, Any] = {
        "title": HOSTILE,
        "description": HOSTILE,
        "deprecated": True,
        "required": ["id"],
        "properties": {
            "id": {"type": "string"},
            "note": {"enum": [HOSTILE], "description": HOSTILE, "x-personal": True},
            "a_name_as_long_as_that_of_a_property_may_ever_be": {"type": "string", "pattern": "x" * 300},
        },
        "examples": [{"id": HOSTILE}],
    }
    (hostile / "made.v1.schema.json").write_text(json.dumps(schema))
    known = catalog.load(events, "shop")
    job = SinkJob(name="totals", events=["account"], transform=HOSTILE)
    consumers = Consumers([job], {one.name: [job] for one in known.schemas}, [HOSTILE])
    target = tmp_path / "events.html"
    target.write_text(page.render(Project(tmp_path, cloudevents_source="/shop"), known, consumers))
    return target


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_readable_and_runs_nothing(chromium: Browser, file: Path, size: Any, scheme: Any) -> None:
    context = chromium.new_context(viewport=size, color_scheme=scheme)
    context.set_default_timeout(WAIT_MS)
    context.add_init_script(path=AXE)
    opened = context.new_page()
    asked: list[str] = []
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(f"{file.as_uri()}#account.opened.v2")
    assert asked == [file.as_uri()]
    assert opened.title() == "Events of outbox"
    assert opened.locator("script, img").count() == 0
    assert opened.get_by_text(HOSTILE).count() > 3
    assert opened.evaluate("() => document.documentElement.scrollWidth") == size["width"]
    top = opened.locator("[id='account.opened.v2']").bounding_box()
    assert top is not None
    assert 0 <= top["y"] < size["height"]
    assert barriers(opened) == []
    context.close()
