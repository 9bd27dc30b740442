"""Where settings and the names of a project come from, which wins, and what a wrong one says. And what a server gets of
a password that only pretends to be ours.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from outbox.base import database, envfile
from outbox.base.errors import Failure
from outbox.base.project import FILE, VARIABLE, Project, current
from outbox.base.project import load as load_project
from outbox.base.settings import (
    FIELDS,
    PREFIX,
    SECRET_NAMES,
    Secret,
    Settings,
    SinkRole,
    SourceRole,
    load,
    stack_env,
)
from outbox.http.async_database import make_async_engine
from outbox.http.database import make_engine
from outbox.kafka.clients import consumer
from outbox_lab.stack.internals import Internals
from outbox_lab.stack.postgres import Postgres
from outbox_lab.testing.failures import raises
from tests.support.fake_postgres import CLEAR_TEXT, MD5, NO_PASSWORD, SCRAM, listening

LOGIN = {"USERNAME": "outbox", "PASSWORD": "hush"}
SASL = {"KAFKA_SECURITY_PROTOCOL": "SASL_SSL"}
TOKEN = SASL | {"KAFKA_SASL_MECHANISM": "OAUTHBEARER", "KAFKA_USERNAME": "shop"}
IAM = SASL | {"KAFKA_SASL_MECHANISM": "AWS_MSK_IAM"}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project root and an environment of the test's own: what is configured on this machine has no say."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    # A project of its own: the checkout's home may have a stack that is up.
    (tmp_path / "pyproject.toml").write_text('[tool.outbox]\nsource-database = "source"\nsink-database = "sink"\n')
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def test_the_environment_wins_over_dotenv_over_stack_env(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def port() -> int:
        return load(project / "home").source_db_url.port

    assert port() == 5432
    (project / "home").mkdir()
    (project / "home" / "stack.env").write_text("OUTBOX_SOURCE_DB_URL=postgresql://127.0.0.1:1111\n")
    assert port() == 1111
    (project / ".env").write_text("OUTBOX_SOURCE_DB_URL=postgresql://127.0.0.1:2222\n")
    assert port() == 2222
    monkeypatch.setenv("OUTBOX_SOURCE_DB_URL", "")
    assert port() == 2222
    monkeypatch.setenv("OUTBOX_SOURCE_DB_URL", "postgresql://127.0.0.1:3333")
    assert port() == 3333
    assert load(project / "home", source_db_url="postgresql://127.0.0.1:4444").source_db_url.port == 4444


def test_the_stack_s_logins_are_for_its_own_servers(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "home").mkdir()
    login = {f"OUTBOX_{of}_{what}": text for of in ("KAFKA", "CONNECT") for what, text in LOGIN.items()}
    spark = {"OUTBOX_SPARK_MASTER": "spark://127.0.0.1:17077", "OUTBOX_SPARK_PROPERTIES": f"{project}/pyproject.toml"}
    servers = {"OUTBOX_KAFKA_BOOTSTRAP": "127.0.0.1:19092", "OUTBOX_CONNECT_URL": "http://127.0.0.1:18083"}
    protocol = {"OUTBOX_KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT"}
    envfile.write(project / "home" / "stack.env", servers | protocol | login | spark)
    assert load(project / "home").connect_login == ("outbox", "hush")
    assert load(project / "home").kafka_username == "outbox"
    assert load(project / "home").spark_properties == project / "pyproject.toml"
    (project / ".env").write_text("OUTBOX_CONNECT_URL=http://connect.example\n")
    monkeypatch.setenv("OUTBOX_KAFKA_BOOTSTRAP", "kafka.example:9092")
    monkeypatch.setenv("OUTBOX_SPARK_MASTER", "local[4]")
    elsewhere = load(project / "home")
    assert elsewhere.connect_login is None
    assert elsewhere.spark_properties is None
    assert elsewhere.connect_password == elsewhere.kafka_password == Secret("")
    assert (elsewhere.kafka_security_protocol, elsewhere.kafka_username) == ("PLAINTEXT", None)
    monkeypatch.setenv("OUTBOX_CONNECT_USERNAME", "of-theirs")
    assert load(project / "home").connect_login == ("of-theirs", "")


def test_the_home_is_given_or_from_the_environment_or_dotenv(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / ".env").write_text(f"OUTBOX_HOME={project}/dotenv\n")
    assert load().home == project / "dotenv"
    monkeypatch.setenv("OUTBOX_HOME", str(project / "environment"))
    assert load().home == project / "environment"
    assert load(project / "given").home == project / "given"
    monkeypatch.chdir(project)
    assert load(Path("here")).home == project / "here"


@pytest.mark.parametrize("file", [".env", "home/stack.env"])
def test_a_misspelled_setting_is_refused_wherever_it_is(
    project: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    (project / "home").mkdir()
    monkeypatch.setenv("OUTBOX_TOPC", "hush")
    (project / file).write_text("OUTBOX_SOURCE_DB_PORT=1\nPATH=elsewhere\nOUTBOX_LOG_LEVEL=loud\n")
    with pytest.raises(Failure, match=rf"OUTBOX_TOPIC_.*{file}: .*OUTBOX_SOURCE_DB_.*OUTBOX_LOG_LEVEL") as caught:
        load(project / "home")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "variables",
    [
        {"SOURCE_DB_URL": "postgresql://[::1]:5432/name?sslmode=prefer"},
        {"SOURCE_DB_URL": "postgresql://%2Fvar%2Frun:5432/a%20name?sslmode=disable"},
        {"CONNECT_SOURCE_DB_URL": "postgresql://db:1/name?sslmode=verify-ca&sslrootcert=/on/another/machine"},
        {"SERVICE_BIND": "[::1]:0"},
        {"CONNECT_SOURCE_DB_PASSWORD_REFERENCE": "${secrets:payments/source-cdc:password}"},
        IAM,
        TOKEN | {"KAFKA_TOKEN_URL": "https://id/t", "KAFKA_TOKEN_SCOPE": "a"},
        {
            "SOURCE_DB_URL": "postgresql://db:1/name?sslmode=prefer",
            "SOURCE_DB_ROLE_PREFIX": "x",
            "SINK_DB_ROLE_PREFIX": "x",
        },
    ],
)
def test_a_value_that_looks_unusual_and_is_right(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(PREFIX + name, value)
    assert load().as_env().items() >= {PREFIX + name: value for name, value in variables.items()}.items()


def test_what_a_stack_has_written_is_read_as_it_was(project: Path) -> None:
    folder = project / "a #b ${HOME} 'c' \\ \"d\" é"
    folder.mkdir()
    (folder / "spark.properties").touch()
    values = {"OUTBOX_SPARK_PROPERTIES": str(folder / "spark.properties"), "OUTBOX_CONNECT_PASSWORD": "a+b/c=_-"}
    envfile.write(folder / "stack.env", values)
    assert stack_env(folder / "stack.env") == values
    settings = load(folder)
    assert (settings.home, settings.spark_properties) == (folder, folder / "spark.properties")
    assert settings.is_embedded("spark_properties")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SOURCE_DB_URL": "db:5432"}, "SOURCE_DB_URL"),
        ({"SOURCE_DB_URL": "postgresql://db:65536"}, "SOURCE_DB_URL"),
        ({"SOURCE_DB_URL": "postgresql://db?sslmode=yes"}, "SOURCE_DB_URL"),
        ({"SOURCE_DB_URL": "postgresql://db?sslrootcert=/no/such/file"}, "SOURCE_DB_URL"),
        ({"SERVICE_BIND": "8080"}, "SERVICE_BIND"),
        ({"SINK_METRICS": "127.0.0.1:65536"}, "SINK_METRICS"),
        ({"TOPIC_PARTITIONS": "0"}, "TOPIC_PARTITIONS"),
        ({"EXACTLY_ONCE": "perhaps"}, "EXACTLY_ONCE"),
        ({"SINK_DRIVER_MEMORY": "100m"}, "SINK_DRIVER_MEMORY"),  # Spark does not start with it
        ({"KAFKA_CAFILE": "/no/such/file"}, "KAFKA_CAFILE"),
        ({"CONNECT_SOURCE_DB_PASSWORD_REFERENCE": "hush"}, "CONNECT_SOURCE_DB_PASSWORD_REFERENCE"),
        # A login has what its mechanism needs, and nothing else, which would be left out in silence.
        (SASL, "KAFKA_USERNAME: .* SASL_SSL with SCRAM-SHA-512 needs username"),
        ({"KAFKA_USERNAME": "shop"}, "KAFKA_USERNAME: .* PLAINTEXT takes no username"),
        (IAM | {"KAFKA_USERNAME": "shop"}, "KAFKA_USERNAME: .* AWS_MSK_IAM takes no username"),
        (TOKEN, "KAFKA_TOKEN_URL: .* OAUTHBEARER needs url"),
        ({"SOURCE_DB_ROLE_PREFIX": "x", "SINK_DB_ROLE_PREFIX": "x"}, "SINK_DB_ROLE_PREFIX: .* same names"),
        (TOKEN | {"KAFKA_TOKEN_URL": "https://shop:hush@id/t"}, "KAFKA_TOKEN_URL: take user and password out"),
        # A URL has no password.
        ({"CONNECT_URL": "https://name:hush@connect.internal:8083"}, "CONNECT_URL: .*password"),
        ({"SOURCE_DB_URL": "postgresql://name:hush@db.internal"}, "SOURCE_DB_URL: .*password"),
        ({"SINK_DB_URL": "postgresql://hush@db.internal"}, "SINK_DB_URL: .*password"),
        ({"CONNECT_SOURCE_DB_URL": "postgresql://db.internal?password=hush"}, "CONNECT_SOURCE_DB_URL: .*password"),
        ({"SINK_STORAGE": "s3a://key:hush@bucket/sinks"}, "SINK_STORAGE: .*password"),
    ],
)
def test_a_wrong_value_or_a_url_with_a_password_is_named_by_its_variable_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(Failure, match=f"wrong settings: {PREFIX}{said}") as caught:
        load()
    assert "\n" not in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "before", "longest"),
    [
        ("OUTBOX_SOURCE_DB_URL", "postgresql://db/", 63),
        ("OUTBOX_CONNECTOR", "", 63),
        ("OUTBOX_SINK_DB_ROLE_PREFIX", "", 63 - len("_auditor")),
    ],
)
def test_no_name_is_longer_than_postgres_keeps(
    monkeypatch: pytest.MonkeyPatch, variable: str, before: str, longest: int
) -> None:
    monkeypatch.setenv(variable, before + "x" * longest)
    assert max(len(load().role_name(role)) for role in (*SourceRole, *SinkRole)) <= 63
    monkeypatch.setenv(variable, before + "x" * (longest + 1))
    with raises("settings-wrong", f"{variable}: ", str(longest)):
        load()


def test_no_secret_is_in_what_settings_print_or_what_a_wrong_one_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name for name in FIELDS if name.endswith(("password", "token"))} == SECRET_NAMES
    for name in SECRET_NAMES:
        monkeypatch.setenv(f"{PREFIX}{name.upper()}", f"hush-{name}")
    settings = load()
    assert settings.source_db_app_password.get_secret_value() == "hush-source_db_app_password"
    for shown in (repr(settings), str(settings), f"{settings.kafka_password}"):
        assert "hush" not in shown
    monkeypatch.setenv("OUTBOX_SOURCE_DB_URL", "hush: a password in the wrong variable")
    with pytest.raises(Failure) as caught:
        load()
    assert "hush" not in str(caught.value)


# The table [tool.outbox] -------------------------------------------------------------------------------------------


def declare(folder: Path, *lines: str) -> Path:
    """A folder with a pyproject.toml of these lines; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text("\n".join(lines))
    return folder


def test_the_table_of_a_project_is_read(tmp_path: Path) -> None:
    assert load_project(declare(tmp_path / "empty", "[tool.outbox]")) == Project(root=tmp_path / "empty")
    lines = ('sink-database = "mine"', 'sinks = ["upsert", "dedup"]', 'connect = "else/where"')
    found = load_project(declare(tmp_path / "other", "[tool.outbox]", *lines))
    assert (found.sink_database, found.sinks) == ("mine", ("upsert", "dedup"))
    assert found.connect == tmp_path / "other" / "else" / "where"
    for number, (line, said) in enumerate(
        [('sinks = "dedup"', "has sinks = "), ("sinks = [1]", "has sinks = "), ('tpoic = "a"', "does not know tpoic")]
    ):
        with raises("project-wrong", said):
            load_project(declare(tmp_path / f"wrong {number}", "[tool.outbox]", line))


def test_the_project_is_the_innermost_around_the_working_directory_or_that_of_the_variable(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.chdir(declare(folder, "[tool.other]"))
    with raises("project-missing", "[tool.outbox]", "in the project's folder", VARIABLE):
        current()
    outer, inner = (declare(folder / name, "[tool.outbox]") for name in ("outer", "outer/inner"))
    tools = declare(outer / "tools", "[tool.other]")
    for here, found in ((outer, outer), (tools, outer), (inner, inner)):
        monkeypatch.chdir(here)
        assert current().root == found
    monkeypatch.setenv(VARIABLE, str(outer))
    assert current().root == outer
    monkeypatch.setenv(VARIABLE, str(folder / "none"))
    with raises("project-missing", "none", f"correct {VARIABLE}"):
        current()


# Passwords ------------------------------------------------------------------------------------------------------------


SERVER = 'connection to server at "127.0.0.1", port 15041 failed: FATAL:  '


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("could not write init file: No space left on device", "database-unavailable"),
        ("the database system is in recovery mode", "database-unavailable"),
        ('password authentication failed for user "x"', "database-login-refused"),
        ('role "x" does not exist', "database-login-refused"),
    ],
)
def test_a_login_that_fails_for_now_is_not_refused_for_good(tmp_path: Path, said: str, code: str) -> None:
    settings = load(tmp_path, environment=False)
    assert database.refusal_of(settings, SinkRole.WRITER, [SERVER + said])[2] == code


def test_a_login_of_kafka_without_a_password_is_named(tmp_path: Path) -> None:
    """A service has none, and needs none: so the client says it, and not the settings."""
    sasl = {"kafka_security_protocol": "SASL_PLAINTEXT", "kafka_username": "shop"}
    with raises("kafka-login-refused", "OUTBOX_KAFKA_PASSWORD"), consumer(load(tmp_path, environment=False, **sasl)):
        pass


PASSWORD = "a-secret"


def to(port: int, home: Path) -> Settings:
    Internals().write(home)
    names = ("source_db_app_password", "sink_db_writer_password")
    url = f"postgresql://127.0.0.1:{port}"
    return load(home, environment=False, source_db_url=url, sink_db_url=url, **dict.fromkeys(names, PASSWORD))


@pytest.mark.parametrize("question", [CLEAR_TEXT, NO_PASSWORD])
def test_a_process_that_takes_the_port_gets_no_password(question: bytes, tmp_path: Path) -> None:
    with listening(question) as fake:
        settings = to(fake.port, tmp_path)
        with pytest.raises(Failure) as refused:
            database.connect(settings, SinkRole.WRITER).close()
        with pytest.raises(OperationalError), make_engine(settings).connect():
            pass
        assert not Postgres(settings).is_ready()
    assert (fake.logins, fake.answers) == (3, [])
    assert refused.value.code == "database-login-refused"
    assert "sslmode=verify-full in OUTBOX_SINK_DB_URL" in str(refused.value)


@pytest.mark.parametrize("questions", [[CLEAR_TEXT], [MD5], [SCRAM, CLEAR_TEXT], [SCRAM, NO_PASSWORD]])
def test_a_process_that_takes_the_port_gets_no_password_of_an_asyncio_service(
    questions: list[bytes], tmp_path: Path
) -> None:
    async def connect(settings: Settings) -> None:
        engine = make_async_engine(settings)
        with pytest.raises(OperationalError, match="SCRAM"):
            async with engine.connect():
                pass
        await engine.dispose()

    with listening(*questions) as fake:
        settings = to(fake.port, tmp_path)
        asyncio.run(connect(settings))
    assert (fake.logins, len(fake.answers)) == (1, questions.count(SCRAM)), "the begin of SCRAM says no password"
    assert not fake.has_got(settings.role_name(SourceRole.APP), PASSWORD)
