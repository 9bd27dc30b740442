"""The configuration files of the JVMs: ours, or those that the project has in its folder ``connect``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outbox.base import project
from outbox.base.settings import Settings, load
from outbox.jvm import archive
from outbox.sink.spark import session
from outbox_lab.stack import config, ports
from outbox_lab.stack.internals import Internals
from outbox_lab.stack.kafka import Kafka

OWN = "# the project's own\n"
SPARK_ENVIRONMENT = (
    *("JAVA_HOME", "SPARK_HOME", "SPARK_LOCAL_DIRS", "PYSPARK_PYTHON"),
    *("SPARK_CONF_DIR", "SPARK_DIST_CLASSPATH", "PYSPARK_SUBMIT_ARGS"),
)
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file into the folder `connect` of a project that has no other."""
    connect = tmp_path / "a project" / "connect"
    connect.mkdir(parents=True)
    ours = replace(project.current(), folders={"connect": connect})
    monkeypatch.setattr(project, "current", lambda: ours)

    def write(name: str) -> Path:
        (connect / name).write_text(OWN)
        return connect / name

    return write


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with free ports."""
    kafka, controller, spark = ports.choose(0, 0, 0)
    home = tmp_path / "home"
    home.mkdir()
    Internals(controller_port=controller, spark_port=spark).write(home)
    return load(home, environment=False, kafka_bootstrap=f"{ports.LOOPBACK}:{kafka}")


@pytest.mark.parametrize("name", [config.BROKER, config.WORKER, config.LOGGING, config.SPARK_LOGGING])
def test_a_file_of_the_project_wins(name: str, write: Write) -> None:
    assert config.file(name) == config.OURS / name
    assert config.file(name).exists()
    own = write(name)
    assert config.file(name) == own


def test_the_broker_starts_with_the_project_s_file(settings: Settings, write: Write) -> None:
    kafka = Kafka(settings)
    (kafka.folder / "data").mkdir(parents=True)
    (kafka.folder / "data" / "meta.properties").touch()  # its storage is formatted
    used = kafka.folder / "server.properties"
    kafka.prepare()
    assert used.read_text().startswith((config.OURS / config.BROKER).read_text())
    write(config.BROKER)
    kafka.prepare()
    assert used.read_text().startswith(f"{OWN}listeners=")


def test_spark_s_driver_logs_as_the_project_s_file_says(
    settings: Settings, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SPARK_ENVIRONMENT:
        monkeypatch.setenv(name, "")  # a session sets them
    for name, answer in {"java_home": "", "jars": [], "spark_jars": []}.items():
        monkeypatch.setattr(session, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(archive, "options", lambda *_: [])

    def used() -> str:
        option = session.launch_config(settings, ())["spark.driver.extraJavaOptions"].split()[0]
        return option.removeprefix("-Dlog4j2.configurationFile=")

    assert session.LOG_CONFIG.exists()
    assert used() == session.LOG_CONFIG.as_uri()
    own = write(session.LOG_CONFIG.name)
    assert used() == own.as_uri(), "a space in its path is quoted"
