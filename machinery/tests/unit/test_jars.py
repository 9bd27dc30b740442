"""The JVM parts: all of them are locked, and an optional part is not downloaded with the others."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from outbox.jvm import jars
from outbox_lab.testing.failures import raises

MODULE = ET.parse(jars.IVY_FILE)  # noqa: S314 - our own file
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
