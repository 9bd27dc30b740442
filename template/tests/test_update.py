"""`copier update`: a project that has replaced the sample gets a newer machinery, and keeps what is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from template.tests import bake
from template.tests.bake import Template
from template.tests.paths import ROOT

pytestmark = pytest.mark.copies

MACHINERY = Path("outbox/base/wait.py")
MIGRATION = '''"""{what}"""

from alembic import op

revision = "{revision}"
down_revision = "{previous}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("CREATE TABLE {table} (id bigint PRIMARY KEY)")


def downgrade() -> None:
    op.execute("DROP TABLE {table}")
'''


NEWEST = max(file.name[:4] for file in (ROOT / "outbox/migrations/source").glob("[0-9]*.py"))
NEXT = f"{int(NEWEST) + 1:04}"


def edit(file: Path, old: str, new: str) -> None:
    """Replace the one place of a text in a file."""
    text = file.read_text()
    assert text.count(old) == 1, (file, old)
    file.write_text(text.replace(old, new))


def migration(folder: Path, name: str, revision: str, previous: str, table: str) -> None:
    """Add a migration that makes a table."""
    (folder / name).write_text(MIGRATION.format(what=table, revision=revision, previous=previous, table=table))


@pytest.fixture
def template(tmp_path: Path) -> Template:
    """An earlier template: it has a file that is gone now, and lacks others."""
    template = Template(tmp_path / "template")
    folder = template.folder
    (folder / "outbox" / "old.py").write_text('"""A module that the machinery has no longer."""\n')
    (folder / "docs" / "runbook.md").rename(folder / "docs" / "operating.md")
    edit(folder / MACHINERY, "from __future__ import annotations\n", "from __future__ import annotations  # earlier\n")
    (folder / "template/minimal/service/app.py").rename(folder / "template/minimal/service/main.py")
    edit(folder / "pyproject.toml", '"alembic>=1.20"', '"alembic>=1.19"')
    bake.commit(folder, "an earlier state")
    return template


@pytest.fixture
def project(template: Template, tmp_path: Path) -> Path:
    """A project made from it, whose owner has replaced the domain and changed a file of the machinery."""
    made = template.made(tmp_path / "shop", project_name="shop", sample="minimal", demo=False)
    bake.git(made, "init", "--quiet")
    bake.commit(made, "begin")
    bake.git(made, "rm", "-r", "--quiet", "service/main.py", "sinks/depots", "tests/sample", "docs/adopting.md")
    (made / "service" / "orders.py").write_text('"""Orders."""\n')
    (made / "sinks" / "orders").mkdir()
    (made / "sinks" / "orders" / "__init__.py").touch()
    (made / "README.md").write_text("# The shop\n")
    migration(made / "migrations/source", "0002_orders.py", "source_domain_0002", "source_domain_0001", "orders")
    with (made / MACHINERY).open("a") as file:
        file.write("\n# the owner's line\n")
    edit(made / "pyproject.toml", '"structlog>=26",\n', '"structlog>=26",\n    "tenacity>=9",\n')
    bake.commit(made, "orders")
    return made


def to_the_present(template: Template) -> None:
    """The template as this checkout has it, with one more migration of the machinery."""
    folder = template.folder
    bake.git(folder, "revert", "--no-edit", "HEAD")
    migration(
        folder / "outbox/migrations/source",
        f"{NEXT}_more.py",
        f"source_machinery_{NEXT}",
        f"source_machinery_{NEWEST}",
        "more_machinery",
    )
    bake.commit(folder, "the present state")


def updated(template: Template, project: Path, **answers: object) -> None:
    """Update the project, and commit that."""
    done = template.update(project, **answers)
    assert done.returncode == 0, done.stderr
    assert list(project.rglob("*.rej")) == []
    assert "<<<<<<<" not in "".join(file.read_text() for file in project.rglob("*.py"))
    bake.git(project, "add", "--all")
    bake.git(project, "commit", "--quiet", "--allow-empty", "--message", "update")


def files(project: Path) -> set[str]:
    """Every file that git knows in a project."""
    return set(bake.git(project, "ls-files").splitlines())


def test_an_update_brings_the_machinery_and_keeps_the_owners_work(template: Template, project: Path) -> None:
    before = files(project)
    to_the_present(template)
    updated(template, project)
    changed = set(bake.git(project, "diff", "--name-only", "HEAD~1").splitlines())
    assert files(project) - before == {"docs/runbook.md", f"outbox/migrations/source/{NEXT}_more.py"}
    assert before - files(project) == {"docs/operating.md", "outbox/old.py"}
    assert changed - (files(project) ^ before) == {".copier-answers.yml", str(MACHINERY), "pyproject.toml"}
    machinery = (project / MACHINERY).read_text()
    assert "# earlier" not in machinery
    assert machinery.endswith("\n# the owner's line\n")
    packages = (project / "pyproject.toml").read_text()
    assert '"alembic>=1.20"' in packages
    assert '"tenacity>=9"' in packages

    updated(template, project)
    assert bake.git(project, "diff", "HEAD~1") == "", "a second update changes nothing"


def test_migrations_of_machinery_and_owner_do_not_collide(template: Template, project: Path) -> None:
    def outbox(*words: str) -> str:
        return bake.python(project, "-m", "outbox", *words, OUTBOX_HOME=str(project / ".outbox"))

    try:
        outbox("up", "postgres")
        assert "source_domain_0002" in outbox("migrate")
        to_the_present(template)
        updated(template, project)
        migrated = outbox("migrate")
        assert f"source_machinery_{NEXT}" in migrated
        assert "domain" not in migrated
    finally:
        outbox("down")


def test_a_part_is_left_out_later_by_an_answer(template: Template, project: Path) -> None:
    assert (project / "monitoring").exists()
    updated(template, project, monitoring=False)
    assert not (project / "monitoring").exists()
    to_the_present(template)
    updated(template, project)
    assert not (project / "monitoring").exists()
