"""The JVM parts: all of them are locked, an optional part is not downloaded with the others, and what is not as locked
is refused.
"""

from __future__ import annotations

import hashlib
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from outbox.base.errors import Failure
from outbox.jvm import jars
from outbox_lab.testing.failures import raises

MODULE = ET.parse(jars.IVY_FILE)  # noqa: S314 - our own file
CONTENT = b"a jar"
CONFIGURATIONS = [conf.attrib["name"] for conf in MODULE.iter("conf")]


def test_every_jar_configuration_is_in_one_set() -> None:
    assert sorted(name for together in jars.SETS for name in together) == sorted(CONFIGURATIONS)
    assert {("lakehouse",), ("s3",), ("msk",)} < {*jars.SETS}


def test_s3_is_of_the_hadoop_that_pyspark_has() -> None:
    [hadoop] = [jar.revision for jar in jars.locked(["s3"]) if jar.module == "hadoop-aws"]
    assert f"hadoop-client-api-{hadoop}.jar" in {jar.name for jar in jars.spark_jars()}


def test_every_dependency_is_locked_at_its_version() -> None:
    wanted = {
        (conf, of["org"], of["name"], of["rev"])
        for of in (dependency.attrib for dependency in MODULE.iter("dependency"))
        for conf in of["conf"].partition("->")[0].split(",")
    }
    assert wanted
    assert wanted <= {jar[:4] for jar in jars.locked(CONFIGURATIONS)}, "run make lock"


def test_every_locked_jar_has_a_checksum_and_a_place_of_its_own() -> None:
    locked = jars.locked(CONFIGURATIONS)
    assert [jar for jar in locked if not re.fullmatch("[0-9a-f]{64}", jar.sha256)] == []
    assert len({jar.path for jar in locked}) == len(locked)


def test_no_jar_for_spark_is_another_copy_of_one_that_pyspark_has() -> None:
    # The names of jars are those of modules, with a version behind them.
    of_pyspark = {re.sub(r"-\d.*", "", jar.name) for jar in jars.spark_jars()}
    assert "jackson-core" in of_pyspark
    assert {jar.module for jar in jars.locked(["spark", "lakehouse", "s3", "msk"])} & of_pyspark == set()


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(jars, "cache_folder", lambda: tmp_path / "file" / "jars")
    with raises("jars-not-writable", str(tmp_path)):
        jars.resolve("lakehouse")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one jar and no metadata."""
    jar = tmp_path / "repository" / "org" / "example" / "part" / "1.0" / "part-1.0.jar"
    jar.parent.mkdir(parents=True)
    jar.write_bytes(CONTENT)
    monkeypatch.setenv("OUTBOX_MAVEN_MIRROR", (tmp_path / "repository").as_uri())
    monkeypatch.setattr(jars, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(jars, "LOCK_FILE", tmp_path / "jars.lock")
    return jar


def write_lock(revision: str, content: bytes) -> None:
    digest = hashlib.sha256(content).hexdigest()
    jars.LOCK_FILE.write_text(f"# locked\nlakehouse org.example part {revision} {digest}\n")


@pytest.mark.usefixtures("repository")
def test_mirror_with_a_password_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    write_lock("1.0", CONTENT)
    monkeypatch.setenv("OUTBOX_MAVEN_MIRROR", "http://name:hush@127.0.0.1:1/maven")
    with pytest.raises(Failure, match="OUTBOX_MAVEN_MIRROR") as caught:
        jars.resolve("lakehouse")
    assert "hush" not in str(caught.value)


def test_a_locked_jar_is_downloaded_once(repository: Path) -> None:
    write_lock("1.0", CONTENT)
    [jar] = jars.jars("lakehouse")
    assert jar.read_bytes() == CONTENT
    repository.unlink()
    assert jars.jars("lakehouse") == [jar]


def test_a_changed_jar_is_refused_and_downloaded_again(repository: Path) -> None:
    write_lock("1.0", CONTENT)
    repository.write_bytes(b"another jar")
    with raises("jars-changed", "part-1.0.jar"):
        jars.resolve("lakehouse")
    repository.write_bytes(CONTENT)
    assert jars.jars("lakehouse")


@pytest.mark.usefixtures("repository")
def test_a_missing_jar_is_reported() -> None:
    write_lock("2.0", CONTENT)
    with raises("jars-not-downloaded", "part-2.0.jar"):
        jars.resolve("lakehouse")
