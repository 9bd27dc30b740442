"""The wheel is the whole machinery and nothing else: it is built, installed, and used where no checkout is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import suite
from tests.support.paths import ROOT

PLACED = {
    "type": "object",
    "required": ["order_id", "cents"],
    "properties": {"order_id": {"type": "string", "maxLength": 40}, "cents": {"type": "integer", "minimum": 0}},
}
# Without site no .pth is read: the environment has the wheel and the standard library. The driver is a stand-in.
APPEND = """
import sys
sys.path += sys.argv[1:]
from outbox.base.errors import Failure
from outbox.dbapi import Event, append

class Driver:
    def cursor(self): return self
    def execute(self, query, parameters): print(query.partition("(")[0], *parameters)
    def close(self): pass

append(Driver(), Event("order", "o-1", "placed", {"order_id": "o-1", "cents": 5}))
try:
    append(Driver(), Event("order", "o-1", "placed", {"order_id": "o-1", "cents": -5}))
except Failure as failure:
    print(failure.code)
"""
UV: list[str | Path] = [Path(sys.executable).with_name("uv"), "--quiet", "--offline", "--no-cache", "--no-config"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without network, from a copy: a build leaves its folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(ROOT, folder / "source", ignore=left_out)
    run([*UV, "build", "--wheel", "--no-build-isolation", "--python", sys.executable, "-o", folder, source], folder)
    (made,) = folder.glob("*.whl")
    return made


def left_out(folder: str, names: list[str]) -> set[str]:
    """The machinery's own tests, and what other builds have left."""
    return {one for one in names if one.endswith(".egg-info") or one == "build" or Path(folder, one) == ROOT / "tests"}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with the packages of this one except the checkout."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=False)
    run([*UV, "pip", "install", "--python", folder / "bin" / "python", "--no-deps", wheel], folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # As a path of its own: the .pth files in it, of which the checkout's is one, are not read.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project as docs/existing-service.md has it: a table in pyproject.toml, the connector's file, and an event."""
    (tmp_path / "pyproject.toml").write_text('[tool.outbox]\nsource-database = "shop"\ntopic-prefix = "shop"\n')
    events = tmp_path / "connect" / "events" / "order"
    events.mkdir(parents=True)
    (events / "aggregate.toml").write_text('key = "order_id"\n')
    (events / "placed.v1.schema.json").write_text(json.dumps(PLACED))
    (tmp_path / "connect" / "outbox.json").write_bytes((suite.DOMAIN / "connect" / "outbox.json").read_bytes())
    return tmp_path


@pytest.fixture
def needed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with only the packages that a service installs beside the wheel."""
    folder = tmp_path_factory.mktemp("needed")
    for name in ("msgspec", "jsonschema_rs"):
        (folder / name).symlink_to(Path(sysconfig.get_path("purelib"), name))
    return folder


def run(command: Sequence[str | Path], folder: Path) -> str:
    """Output of a command that knows neither this project nor its folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OUTBOX_", "PYTHONPATH"))}
    done = subprocess.run(command, cwd=folder, env=inherited, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_every_file_of_the_machinery_and_no_other(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "outbox", "outbox_lab"],
        cwd=ROOT / "src",
        capture_output=True,
        text=True,
        check=True,
    )
    ours = {name: file for name in listed.stdout.split("\0") if name and (file := ROOT / "src" / name).exists()}
    with zipfile.ZipFile(wheel) as archive:
        found = {entry.filename: entry for entry in archive.infolist() if ".dist-info/" not in entry.filename}
        assert set(found) == set(ours)
        assert [name for name, file in ours.items() if archive.read(name) != file.read_bytes()] == []
    executable = {name for name, entry in found.items() if entry.external_attr >> 16 & 0o111}
    assert executable == {name for name, file in ours.items() if os.access(file, os.X_OK)} != set()


def test_the_command_works_for_a_project_elsewhere(installed: Path, project: Path) -> None:
    code = "import outbox; from outbox.jvm.java import PACKAGED_HOME as home; print(outbox.__file__, home / 'bin/java')"
    package, java = run([installed / "python", "-c", code], project).split()
    assert Path(package).is_relative_to(installed.parent)
    assert os.access(java, os.X_OK)
    rendered = json.loads(run([installed / "outbox", "connect", "render"], project))
    assert rendered["database.dbname"] == "shop"
    assert rendered["transforms.outbox.route.topic.replacement"] == "shop.${routedByValue}"


def test_append_by_dbapi_needs_two_packages(installed: Path, project: Path, needed: Path) -> None:
    (packages,) = installed.parent.glob("lib/python*/site-packages")
    inserted, refused = run([installed / "python", "-S", "-c", APPEND, packages, needed], project).splitlines()
    assert inserted == 'INSERT INTO public.outbox  order o-1 placed {"order_id":"o-1","cents":5} 1 None'
    assert refused == "event-invalid"
