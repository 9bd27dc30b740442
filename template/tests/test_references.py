"""Pages and comments name only what a reader finds: each file, test, anchor and target, in every kind of project."""

from __future__ import annotations

from pathlib import Path

import pytest

from template.tests import references
from template.tests.paths import ROOT


def test_the_template_has_what_pages_name_of_it() -> None:
    assert references.dead(ROOT, elsewhere=True) == []


PAGE = """\
# A page

`sinks/one.sql`, `sinks/none.sql` and [another](other.md), [gone](gone.md), [here](#a-page), [not here](#b).
Run `make test`, then `make nothing`. `tests/test_one.py::test_it`, `tests/test_one.py::test_none`

`sinks/written.sql`:

    -- docs/in-code.md

The larger sample has `sinks/large.sql`.

- `sinks/item.sql`
- In the template's repository: `sinks/elsewhere.sql`

## The larger sample

`sinks/section.sql`

### Part of it

`sinks/part.sql`

## Another

Not of the sample: `sinks/written.sql`, `sinks/last.sql`, `sinks/NAME.sql`.
"""


CODE = '''\
"""`docs/of-docstring.md`"""
# docs/of-python.md
PATH = "docs/text.md"
def test_it(): ...
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a page, a comment of each kind, and what they should name."""
    files = {
        "docs/page.md": PAGE,
        "docs/other.md": "",
        "sinks/one.sql": "-- docs/page.md, docs/of-sql.md\nSELECT 'docs/no-comment.md';\n",
        "tests/test_one.py": CODE,
        "Makefile": "# docs/of-make.md\ntest: other\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_is_dead_is_found_and_what_is_elsewhere_is_left_out(project: Path) -> None:
    expected = {
        "Makefile:1: docs/of-make.md",
        *(f"docs/page.md:3: {what}" for what in ("(#b)", "(gone.md)", "make nothing", "sinks/none.sql")),
        "docs/page.md:3: tests/test_one.py::test_none",
        "docs/page.md:12: sinks/item.sql",
        "docs/page.md:25: sinks/last.sql",
        "sinks/one.sql:1: docs/of-sql.md",
        "tests/test_one.py:1: docs/of-docstring.md",
        "tests/test_one.py:2: docs/of-python.md",
    }
    assert set(references.dead(project)) == expected
    elsewhere = {found.partition(": ")[2] for found in {*references.dead(project, elsewhere=True)} - expected}
    assert elsewhere == {f"sinks/{name}.sql" for name in ("large", "elsewhere", "section", "part")}
