"""`copier copy`: every combination of answers that matters gives a project whose every module loads and checks."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from outbox import install
from outbox.base.project import Project

from template.tests import bake, dockerfile, references
from template.tests.bake import Template
from template.tests.paths import ROOT

pytestmark = pytest.mark.copies

# Of a minimal project: what its owner has to read.
FILES_MAX, LINES_MAX = 45, 1600
PRODUCT = ("service", "sinks", "demo")
CHECKED = ROOT / "machinery" / ".mypy_cache"  # with the installed packages, if `make check` has run
PACKAGES = (*PRODUCT, "migrations", "tests")
LOAD = """
import importlib, sys
from outbox.base import settings
from outbox.sink import discovery
for module in sys.argv[1:]:
    importlib.import_module(module)
print(*discovery.sinks(settings.load(environment=False)))
"""
# Lines of pyproject.toml for what only this repository has.
OF_THE_REPOSITORY = tuple(
    line
    for line in (ROOT / "pyproject.toml").read_text().splitlines()
    if re.match('"(bench|proof|template)|    "(browser|chain|cluster|copies|doors): ', line)
)
# Names of the template itself, which no project knows.
TRACES = ("template/tests", "template.tests", "copier.yml", "{%", "{{ project_name")

COMBINATIONS: dict[str, dict[str, object]] = {
    "ledger": {},
    "ledger without changes and monitoring": {"changes": False, "monitoring": False},
    "ledger without lakehouse": {"lakehouse": False},
    "ledger without demo": {"demo": False},
    "ledger with nothing": {
        "changes": False,
        "lakehouse": False,
        "monitoring": False,
        "demo": False,
        "licence": "none",
    },
    "minimal": {"sample": "minimal"},
    "minimal with everything": {"sample": "minimal", "machinery": "copy", "monitoring": True, "cluster": True},
    "fastapi": {"sample": "minimal", "web": "fastapi"},
    "minimal with nothing": {"sample": "minimal", "demo": False, "licence": "none"},
}

QUESTIONS = (
    *("copier.yml", "LICENSE", "pyproject.toml", "template/link", "template/address", "template/pyproject.toml.jinja"),
    *("template/minimal/pyproject.toml.jinja", "machinery/src/outbox/requirements"),
)
WRONG_ANSWERS: list[dict[str, object]] = [
    {"project_name": "Stock"},
    {"project_name": "2stock"},
    {"project_name": "stock--room"},
    {"project_name": "stock_room"},
    {"project_name": "stock room"},
    {"project_name": "lagerhäuser"},
    {"project_name": "stock-"},
    {"project_name": "stock\n"},
    {"project_name": "s"},
    {"project_name": "a" * 41},
    {"project_name": "postgres"},
    {"project_name": "pg-stock"},
    {"project_name": "flask"},
    {"topic_prefix": "stock/room"},
    {"topic_prefix": ".."},
    {"topic_prefix": "a" * 101},
    {"connector": "Stock"},
    {"connector": "stock-room"},
    {"connector": "ledger"},
    {"connector": "ledger", "topic_prefix": "ledger.offsets"},
    {"sample": "large"},
    {"sample": "minimal", "web": "django"},
    {"sample": "ledger", "web": "fastapi"},
    {"licence": "MIT"},
]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """The checkout as a template."""
    return Template(tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Template:
    """As little of this checkout as asks its questions, and writes their answers down."""
    return Template(tmp_path_factory.mktemp("questions"), *QUESTIONS)


@pytest.fixture(scope="module", params=COMBINATIONS)
def project(
    template: Template, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A project in a folder with a space."""
    folder = tmp_path_factory.mktemp("a project") / "stock room"
    yield template.made(folder, project_name="stock-room", **COMBINATIONS[request.param])
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def copied(template: Template, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a copied machinery and every default, made where no network is."""
    folder = tmp_path_factory.mktemp("copied")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:1")
    answers = ("--data", "machinery=copy", str(template.folder), "made")
    done = bake.copier(folder, "copy", *answers, GIT_ALLOW_PROTOCOL="file", **nowhere)
    assert done.returncode == 0, done.stderr
    return folder / "made"


# A project that checks ----------------------------------------------------------------------------------------------


def test_lint_and_types(project: Path) -> None:
    bake.python(project, "-m", "ruff", "check", "--no-cache", ".")
    bake.python(project, "-m", "ruff", "format", "--no-cache", "--check", ".")
    cache = project.parent.parent / "mypy"  # of all combinations: what they share is checked once
    if CHECKED.exists() and not cache.exists():
        shutil.copytree(CHECKED, cache)
    bake.python(
        project, "-m", "mypy", "--cache-dir", str(cache), *(name for name in PACKAGES if (project / name).exists())
    )


# Between these are combinations of which mypy has followed each import.
@pytest.mark.parametrize(
    "project", ["ledger", "ledger with nothing", "minimal", "fastapi", "minimal with nothing"], indirect=True
)
def test_every_module_loads_and_every_sink_is_found(project: Path) -> None:
    files = [file.relative_to(project) for name in PRODUCT for file in (project / name).rglob("*.py")]
    modules = [".".join(file.with_suffix("").parts) for file in files if file.stem not in ("__init__", "__main__")]
    assert len(modules) > 1
    sinks = bake.python(project, "-c", LOAD, *modules).split()
    optional = {folder: [folder] for folder in ("changes", "lakehouse", "turnover")}
    optional["naive"] = ["balances-naive", "balances-naive-logged"]
    optional["offset_log"] = ["balances-offset-log"]
    there = {sink for folder, names in optional.items() if (project / "sinks" / folder).exists() for sink in names}
    if (project / "sinks" / "depots").exists():
        assert set(sinks) == {"depots"}
    else:
        strategies = ("merge", "offsets", "upsert", "versions")
        balances = {"balances", *(f"balances-{name}" for name in strategies)}
        assert set(sinks) == {"accounts", *balances, "feed", "statements", *there}
    running = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["outbox"]["sinks"]
    assert running == (["depots"] if (project / "sinks" / "depots").exists() else ["balances", "accounts"])
    assert set(running) <= set(sinks)


def test_the_images_have_their_files(project: Path) -> None:
    compose = yaml.safe_load((project / "docker-compose.yml").read_text())
    stages = dockerfile.stages(project / "Dockerfile")
    built = [one["build"]["target"] for one in compose["services"].values() if "build" in one and "profiles" not in one]
    assert len(built) > 3
    for target in built:
        for stage in dockerfile.lineage(stages, target):
            copied = [file for file, _ in stage.our_files(project)]
            copied += [project / source for sources, _ in stage.copies() for source in sources]
            assert [file for file in copied if not file.exists()] == []


def test_its_pages_name_what_it_has(project: Path) -> None:
    dead = references.dead(project)
    # The pages of a copied machinery are our own: they name its tests, which stay here.
    assert [one for one in dead if one.startswith("machinery/") and ": (" in one] == [], "links that lead nowhere"
    found = [one for one in dead if not one.startswith("machinery/")]
    # Pages, and modules of the machinery, are where it is installed from (README).
    ours = {"docs/": (ROOT, ROOT / "machinery"), "outbox/": (ROOT / "machinery" / "src",)}
    named = [one.rpartition(": ")[2] for one in found]
    places = {one: next((of for start, of in ours.items() if one.startswith(start)), ()) for one in named}
    assert [one for one in named if not any((place / one).exists() for place in places[one])] == []


# A project of its own -----------------------------------------------------------------------------------------------


def test_it_has_its_own_names(project: Path) -> None:
    made = tomllib.loads((project / "pyproject.toml").read_text())
    assert ("player" in made["tool"]["outbox"]) is (project / "demo" / "page").exists(), "a player of its own"
    names = made["tool"]["outbox"]
    assert made["project"]["name"] == "stock-room"
    assert names["source-database"] == "stock_room"
    assert names["sink-database"] == "stock_room_sink"
    assert names["topic-prefix"] == "stock-room"
    assert names["connector"] == "stock_room_outbox"
    assert {name.replace("-", "_") for name in names} <= set(Project.__dataclass_fields__)
    assert (project / "README.md").read_text().startswith("# stock-room\n")
    assert (project / "LICENSE").exists() is ("license" in made["project"])


def test_nothing_of_the_template_is_in_it(project: Path) -> None:
    files = [Path(folder, name) for folder, _, names in os.walk(project) for name in names]
    assert [file for file in files if file.is_symlink() or file.suffix == ".jinja"] == []
    for file in (one for one in files if not one.is_relative_to(project / "machinery")):
        if file.suffix in (".md", ".toml", ".yml", ".cfg", "") and file.name not in ("LICENSE", ".copier-answers.yml"):
            text = file.read_text()
            assert [trace for trace in TRACES if trace in text] == [], file


def test_git_takes_it_as_it_is(project: Path) -> None:
    bake.git(project, "init", "--quiet")
    bake.commit(project)
    assert bake.git(project, "status", "--porcelain", "--ignored") == ""
    java = project / "machinery/src/outbox/jvm/jre/bin/java"
    assert java.exists() is (project / "machinery").exists()
    assert not java.exists() or stat.S_IMODE(java.stat().st_mode) & stat.S_IXUSR


@pytest.mark.parametrize("project", ["ledger"], indirect=True)
def test_the_naive_sink_is_a_folder_that_may_go(project: Path, tmp_path: Path) -> None:
    without = shutil.copytree(project, tmp_path / "made", ignore=shutil.ignore_patterns("naive"))
    test_every_module_loads_and_every_sink_is_found(without)


# The template -------------------------------------------------------------------------------------------------------


class TestCopiedMachinery:
    def test_generation_needs_no_network_and_no_trust(self, copied: Path) -> None:
        """Tasks are what trust is for; copier refuses to run any without it."""
        assert (copied / "Makefile").exists()
        known = {name for name in yaml.safe_load((ROOT / "copier.yml").read_text()) if name.startswith("_")}
        assert known == {"_min_copier_version", "_subdirectory", "_exclude", "_message_after_copy"}

    def test_it_comes_without_its_tests(self, copied: Path) -> None:
        assert (copied / "machinery" / "src").exists()
        assert not (copied / "machinery" / "tests").exists()

    def test_with_a_copied_machinery_it_is_this_repository(self, copied: Path) -> None:
        ours = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line not in OF_THE_REPOSITORY]
        text = "\n".join(ours).replace(', "bench", "proof", "template"', "").replace("markers = [\n]\n", "")
        assert (copied / "pyproject.toml").read_text().rstrip() == text
        made, own = ((folder / "docker-compose.yml").read_text().rstrip() for folder in (copied, ROOT))
        assert made == own


@pytest.mark.parametrize("project", ["minimal", "fastapi"], indirect=True)
def test_a_minimal_project_is_a_page_of_files(project: Path) -> None:
    made = [file for file in project.rglob("*") if file.is_file() and ".git" not in file.relative_to(project).parts]
    lines = {file: len(file.read_text().splitlines()) for file in made}
    assert len(lines) <= FILES_MAX, sorted(lines)
    assert sum(lines.values()) <= LINES_MAX, lines


def test_both_samples_have_the_same_frame() -> None:
    links: dict[str, set[str]] = {}
    for name in ("ledger", "minimal"):
        folder = ROOT / "template" / name
        found = [Path(parent, one) for parent, dirs, names in os.walk(folder) for one in [*dirs, *names]]
        links[name] = {one.relative_to(folder).as_posix() for one in found if one.is_symlink()}
        assert all(one.exists() for one in found), "a link leads nowhere"
    only_the_ledger = {"connect", "demo", "migrations", "service", "sinks", "tests"}
    assert links["ledger"] - links["minimal"] == only_the_ledger
    assert {name.partition("/")[0] for name in links["minimal"] - links["ledger"]} <= {"connect", "demo"}


def test_the_frameworks_differ_in_the_service_alone() -> None:
    found: dict[str, dict[str, Path]] = {}
    for name in ("minimal", "minimal-fastapi"):
        folder = ROOT / "template" / name
        walked = [Path(parent, one) for parent, _, names in os.walk(folder, followlinks=True) for one in names]
        found[name] = {one.relative_to(folder).as_posix(): one.resolve() for one in walked}
    differing = {file for file, _ in found["minimal"].items() ^ found["minimal-fastapi"].items()}
    assert differing == {"service/app.py", "Dockerfile", "Dockerfile.jinja"}


@pytest.mark.parametrize("project", ["minimal", "fastapi"], indirect=True)
def test_a_project_knows_one_framework(project: Path) -> None:
    """Its modules import no other, nor do the packages that it installs have another."""
    own = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["outbox"].get("web", "flask")
    other = {"flask": "fastapi", "fastapi": "flask"}[own]
    texts = {file: file.read_text() for file in project.rglob("*.py") if "machinery" not in file.parts}
    assert [file for file, text in texts.items() if re.search(rf"(import|from) {other}\b", text)] == []
    suffix = {"flask": "", "fastapi": "-fastapi"}[own]
    assert f"requirements/service{suffix}.txt" in (project / "Dockerfile").read_text()
    for name in ("dev", "demo", "service"):
        packages = (install.LOCKS / f"{name}{suffix}.txt").read_text()
        assert re.search(rf"(?m)^{own}==", packages)
        assert not re.search(rf"(?m)^{other}(-[a-z0-9-]+)?==", packages)


def test_a_link_to_a_file_loses_no_mode() -> None:
    """copier takes the mode of a linked file from git's entry for the link, which has none."""
    found = [Path(parent, name) for parent, _, names in os.walk(ROOT / "template") for name in names]
    links = [file for file in found if file.is_symlink()]
    assert len(links) > 10
    assert [file for file in links if file.stat().st_mode & stat.S_IXUSR] == []


# The answers --------------------------------------------------------------------------------------------------------


# The projects of the other tests are called `ledger` and `stock-room`.
@pytest.mark.parametrize("name", ["a1", "x-2-y", "a" + "b" * 39])
def test_a_name_that_works(questions: Template, tmp_path: Path, name: str) -> None:
    made = questions.made(tmp_path / "made", project_name=name, sample="minimal")
    names: dict[str, Any] = tomllib.loads((made / "pyproject.toml").read_text())["tool"]["outbox"]
    assert names["source-database"] == name.replace("-", "_")


def test_a_wrong_answer_is_refused_and_nothing_is_made(questions: Template, tmp_path: Path) -> None:
    attempts = zip(WRONG_ANSWERS, questions.attempts(tmp_path / "made", WRONG_ANSWERS), strict=True)
    refused = [
        answers
        for answers, (status, errors) in attempts
        if status != 0 and ("alidation error" in errors or "Invalid" in errors)
    ]
    assert refused == WRONG_ANSWERS
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("login", ["name:hush", "hush"])
def test_template_at_an_address_with_a_password_is_refused(questions: Template, tmp_path: Path, login: str) -> None:
    address = f"git+https://{login}@example.org/template.git"
    elsewhere = {
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{questions.folder}.insteadOf",
        "GIT_CONFIG_VALUE_0": address.removeprefix("git+"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),  # copier keeps clones there
    }
    done = bake.copier(tmp_path, "copy", address, "made", **elsewhere)
    assert done.returncode != 0
    assert "address has a password" in done.stderr
    assert not (tmp_path / "made").exists()


def test_a_git_without_links_is_refused(questions: Template, tmp_path: Path) -> None:
    config = tmp_path / "gitconfig"
    config.write_text("[core]\nsymlinks = false\n")
    done = bake.copier(tmp_path, "copy", str(questions.folder), "made", GIT_CONFIG_GLOBAL=str(config))
    assert done.returncode != 0
    assert "core.symlinks" in done.stderr
    assert not (tmp_path / "made").exists()
