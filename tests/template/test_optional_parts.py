"""Optional parts are folders: one that is deleted, with its tests, breaks nothing else.

Each is deleted in a copy, in which the quick tests run and every test is collected, so that every module is imported.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.template import scratch

pytestmark = pytest.mark.copies

PARTS: dict[str, list[str]] = {
    "changes": [
        "sinks/changes",
        "connect/changes.json",
        "connect/events/account-change.v1.schema.json",
        "tests/sample/changes",
    ],
    "naive": ["sinks/naive"],
    "lakehouse": ["sinks/lakehouse", "outbox/sink/lakehouse", "tests/sample/lakehouse"],
    "monitoring": ["monitoring", "tests/template/monitoring"],
    "demo": ["demo", "tests/template/demo"],
    "bench": ["bench"],
}
# What runs, by suite; all that a suite has is collected first. Left out are tests that start servers or many processes.
SELECTED = {
    "tests/machinery": "unit and (test_sink or test_records or test_connectors or test_settings)",
    "tests/sample": "unit and not integration and not pipeline",
    "tests/template": "test_imports or test_words or test_guarantees or test_strategies_page or test_compose",
}


@pytest.fixture(params=PARTS)
def without(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A copy of the repository without a part."""
    parts = [part for part in PARTS[request.param] if (ROOT / part).exists()]
    if not parts:
        pytest.skip("it is deleted here too")
    with tempfile.TemporaryDirectory(prefix="outbox copy ") as folder:
        yield scratch.copy(Path(folder), parts)


def test_nothing_else_breaks(without: Path) -> None:
    for suite, selected in SELECTED.items():
        done = scratch.run(without, "pytest", "-q", "-p", "no:cacheprovider", suite, "-k", selected)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    for command in (["--help"], ["sink", "--help"], ["doctor", "--help"]):
        done = scratch.run(without, "outbox", *command)
        assert (done.returncode, done.stderr) == (0, "")
