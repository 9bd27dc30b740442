"""`copier update`: a project that has replaced the sample gets a newer machinery, and keeps what is its own."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from template.tests import bake
from template.tests.bake import Template
from template.tests.paths import ROOT

pytestmark = pytest.mark.copies

MACHINERY = Path("machinery/src/outbox/base/wait.py")
MIGRATIONS = Path("machinery/src/outbox/migrations/source")
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


NEWEST = max(file.name[:4] for file in (ROOT / MIGRATIONS).glob("[0-9]*.py"))
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
    (folder / "machinery/src/outbox/old.py").write_text('"""A module that the machinery has no longer."""\n')
    edit(folder / MACHINERY, "from __future__ import annotations\n", "from __future__ import annotations  # earlier\n")
    edit(folder / "Makefile", "\nclean: ##", "\nclean: # earlier ##")
    (folder / "template/minimal/service/app.py").rename(folder / "template/minimal/service/main.py")
    bake.commit(folder, "an earlier state")
    return template


def replaced(template: Template, project: Path, machinery: str) -> Path:
    """A project made from it, whose owner has replaced the domain, and has edited what the template brings."""
    made = template.made(project, project_name="shop", sample="minimal", demo=False, machinery=machinery)
    bake.git(made, "init", "--quiet")
    bake.commit(made, "begin")
    bake.git(made, "rm", "-r", "--quiet", "service/main.py", "sinks/depots", "tests/integration", "tests/pipeline")
    (made / "service" / "orders.py").write_text('"""Orders."""\n')
    (made / "sinks" / "orders").mkdir()
    (made / "sinks" / "orders" / "__init__.py").touch()
    (made / "README.md").write_text("# The shop\n")
    migration(made / "migrations/source", "0002_orders.py", "source_domain_0002", "source_domain_0001", "orders")
    edit(made / "pyproject.toml", "dependencies = []", 'dependencies = ["tenacity>=9"]')
    with (made / "Makefile").open("a") as file:
        file.write("\n# the owner's line\n")
    if machinery == "copy":
        with (made / MACHINERY).open("a") as file:
            file.write("\n# the owner's line\n")
    bake.commit(made, "orders")
    return made


def to_the_present(template: Template) -> None:
    """The template as this checkout has it, with one more migration of the machinery."""
    folder = template.folder
    bake.git(folder, "revert", "--no-edit", "HEAD")
    next_ = (f"{NEXT}_more.py", f"source_machinery_{NEXT}", f"source_machinery_{NEWEST}", "more_machinery")
    migration(folder / MIGRATIONS, *next_)
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


def changed(project: Path) -> set[str]:
    """Files that the last commit has changed."""
    return set(bake.git(project, "diff", "--name-only", "HEAD~1").splitlines())


def pinned(project: Path) -> str:
    """The commit whose machinery is installed."""
    sources = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["uv"]["sources"]
    return str(sources["outbox-machinery"]["rev"])


def test_an_update_moves_the_machinery_and_keeps_the_owners_work(template: Template, tmp_path: Path) -> None:
    project = replaced(template, tmp_path / "shop", "package")
    before, first = files(project), pinned(project)
    assert first == bake.git(template.folder, "rev-parse", "HEAD").strip()
    updated(template, project, monitoring=True)
    assert (project / "monitoring").exists()
    updated(template, project, monitoring=False)
    assert files(project) == before, "a part comes and goes by an answer"
    to_the_present(template)
    updated(template, project)
    assert files(project) == before
    assert changed(project) == {".copier-answers.yml", "Makefile", "pyproject.toml"}
    assert pinned(project) == bake.git(template.folder, "rev-parse", "HEAD").strip() != first
    assert 'dependencies = ["tenacity>=9"]' in (project / "pyproject.toml").read_text()
    makefile = (project / "Makefile").read_text()
    assert "# earlier" not in makefile
    assert makefile.endswith("\n# the owner's line\n")
    updated(template, project)
    assert bake.git(project, "diff", "HEAD~1") == "", "a second update changes nothing"


def test_an_update_merges_a_copied_machinery(template: Template, tmp_path: Path) -> None:
    """Its next migration and the owner's do not collide either."""
    project = replaced(template, tmp_path / "shop", "copy")
    before = files(project)

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
    assert files(project) - before == {f"{MIGRATIONS}/{NEXT}_more.py"}
    assert before - files(project) == {"machinery/src/outbox/old.py"}
    assert changed(project) - (files(project) ^ before) == {".copier-answers.yml", "Makefile", str(MACHINERY)}
    machinery = (project / MACHINERY).read_text()
    assert "# earlier" not in machinery
    assert machinery.endswith("\n# the owner's line\n")
