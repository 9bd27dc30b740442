"""Class archives: a JVM uses one that fits, and starts without one that does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outbox.jvm import archive
from outbox.jvm.jars import spark_jars
from outbox.jvm.java import java

SHARED = "source: shared objects file (top)"


@pytest.fixture
def jar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A jar with a program; no archive is recorded yet."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "a prefix"))
    monkeypatch.delenv(archive.VARIABLE, raising=False)
    ivy = next(jar for jar in spark_jars() if jar.name.startswith("ivy-"))
    return Path(shutil.copy(ivy, tmp_path / "program.jar"))


def run(jar: Path) -> str:
    """The output of the program, which names the source of each class."""
    options = [*archive.options("program", [jar]), "-Xlog:class+load=info"]
    argv: list[str | Path] = [java(), *options, "-cp", jar, "org.apache.ivy.Main", "-version"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "Apache Ivy" in done.stdout
    return done.stdout


def record(jar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program record its archive, which is not installed by that."""
    with monkeypatch.context() as patched:
        patched.setenv(archive.VARIABLE, "record")
        run(jar)


def test_a_recorded_archive_is_used_until_it_is_switched_off(jar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(jar, monkeypatch)
    assert SHARED not in run(jar), "not installed yet"
    assert archive.install("program", [jar])
    assert SHARED in run(jar)
    monkeypatch.setenv(archive.VARIABLE, "off")
    assert SHARED not in run(jar)


def test_an_archive_of_another_jar_is_not_used_but_replaced(jar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(jar, monkeypatch)
    assert archive.install("program", [jar])
    before = archive.path("program", [jar])
    os.utime(jar, (0, 0))
    assert archive.options("program", [jar]) == []
    record(jar, monkeypatch)
    assert archive.install("program", [jar])
    assert archive.path("program", [jar]).exists()
    assert not before.exists()


def test_a_jvm_starts_silently_without_an_archive_that_does_not_fit(jar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(jar, monkeypatch)
    assert archive.install("program", [jar])
    recorded = archive.path("program", [jar])
    os.utime(jar, (0, 0))
    recorded.rename(archive.path("program", [jar]))
    output = run(jar)
    assert SHARED not in output
    assert "[warning]" not in output


@pytest.mark.parametrize("content", [None, b"", bytes(4096)], ids=["missing", "empty", "interrupted"])
def test_an_incomplete_recording_is_not_installed(jar: Path, content: bytes | None) -> None:
    recording = archive.path("program", [jar]).with_suffix(".new")
    if content is not None:
        recording.parent.mkdir(parents=True)
        recording.write_bytes(content)
    assert not archive.install("program", [jar])
    assert archive.options("program", [jar]) == []
