"""Every setting, typed and validated at start.

Precedence, highest first: environment variables; ``.env`` in the project root; ``stack.env`` in the home folder,
which the embedded stack writes (ports it chose, passwords it generated); the defaults below. So a command does not
know whether it talks to the embedded stack, to docker-compose or to servers of your own.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from dotenv import dotenv_values
from msgspec import Meta
from msgspec.structs import FieldInfo

from outbox.base import project, wait
from outbox.base.errors import Failure
from outbox.base.heavy import extensions, psycopg2

PREFIX = "OUTBOX_"
DOTENV = "OUTBOX_DOTENV"  # names another file in place of .env
# Variables with the prefix that are no settings, and who reads them.
READ_ELSEWHERE = {
    DOTENV: "this module",
    project.VARIABLE: "outbox/base/project.py",
    wait.SCALE_VARIABLE: "outbox/base/wait.py",
    "OUTBOX_JVM_ARCHIVES": "outbox/jvm/archive.py",
    "OUTBOX_JVM_LOG_LEVEL": "the logging file of broker and worker",
    "OUTBOX_PROCESS": "outbox_lab/stack/process.py",
    "OUTBOX_CONNECT_LISTENER": "the worker's properties",
    "OUTBOX_CONNECT_EXACTLY_ONCE": "the worker's properties",
    "OUTBOX_CONNECT_KEYSTORE": "the properties of a worker with TLS: docs/bring-your-own.md",
    "OUTBOX_GRAFANA_PORT": "docker-compose.yml",
    "OUTBOX_PROMETHEUS_PORT": "docker-compose.yml",
    "OUTBOX_SINK_MEMORY_LIMIT": "docker-compose.yml",
    "OUTBOX_SPARK_CORES": "docker-compose.yml",
    "OUTBOX_TEST_POSTGRES": "tests",
    "OUTBOX_TEST_SEED": "tests",
}
SYSTEM_ROOTS = Path("system")  # libpq's word for the certificate authorities that the system trusts
DRIVER_MEMORY_MIN_MIB = 512  # Spark refuses to start with less than 450, of which the JVM keeps some to itself

# The embedded stack's logins, and the file with one, are for its own servers: with another address they do not count.
LOGINS = {
    "kafka_bootstrap": ("kafka_security_protocol", "kafka_sasl_mechanism", "kafka_username", "kafka_password"),
    "connect_url": ("connect_username", "connect_password"),
    "spark_master": ("spark_properties",),
}

URLS = ("source_db_url", "sink_db_url", "connect_source_db_url")
LOGIN_URLS = ("connect_url", "kafka_token_url")  # whose user and password are settings of their own
ADDRESSES = ("service_bind", "sink_metrics")
FILES = ("source_db_url", "sink_db_url", "kafka_cafile", "connect_cafile", "spark_properties")
NAME = r"^[a-z][a-z0-9_]*\Z"
SLOT = r"^[a-z0-9_]+\Z"
# Postgres cuts a longer name off, and then does not find what it has made.
NAME_MAX = 63

SCRAM = "scram-sha-256"  # the name of libpq
SslMode = Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"]


class SourceRole(Enum):
    """The roles of the service's database. In Postgres each is named ``<prefix>_<role>``: `Settings.role_name`."""

    OWNER = "owner"
    APP = "app"
    CDC = "cdc"
    PRUNER = "pruner"
    AUDITOR = "auditor"


class SinkRole(Enum):
    """The roles of the sinks' database."""

    OWNER = "owner"
    WRITER = "writer"
    PRUNER = "pruner"
    AUDITOR = "auditor"


Role = SourceRole | SinkRole
ROLE_PREFIX_MAX = NAME_MAX - max(len(f"_{role.value}") for role in (*SourceRole, *SinkRole))


class Secret:
    """A password or a token. Neither `repr`, `str` nor an encoder shows the value."""

    def __init__(self, value: str) -> None:
        self._value = value

    def get_secret_value(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "**********" if self._value else ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


def _named(name: str) -> Any:
    """A default that is a name of the project."""
    return msgspec.field(default_factory=lambda: getattr(project.current(), name))


EMPTY = Secret("")
Port = Annotated[int, Meta(ge=1, le=65535)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
DatabaseName = Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
RolePrefix = Annotated[str, Meta(pattern=NAME, max_length=ROLE_PREFIX_MAX)]
SlotName = Annotated[str, Meta(pattern=SLOT, max_length=NAME_MAX)]


class DatabaseUrl(msgspec.Struct, frozen=True):
    """Where a database is. Its text is ``postgresql://host:port/name?sslmode=…&sslrootcert=…``."""

    host: str = "127.0.0.1"
    port: Port = 5432
    name: DatabaseName = ""
    sslmode: SslMode = "prefer"
    sslrootcert: Path | None = None  # CA file, for verify-ca and verify-full

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else quote(self.host, safe="")
        rootcert = {} if self.sslrootcert is None else {"sslrootcert": self.sslrootcert}
        options = urlencode({"sslmode": self.sslmode, **rootcert}, safe="/:${}", quote_via=quote)
        return f"postgresql://{host}:{self.port}/{quote(self.name, safe='')}?{options}"

    def replace(self, **changes: Any) -> DatabaseUrl:
        """A copy with other values of some parts, which are not validated."""
        return msgspec.structs.replace(self, **changes)

    @property
    def server(self) -> tuple[str, int]:
        """Host and port."""
        return self.host, self.port


def _database(default: str) -> Any:
    """A default that is a database of the project on this host."""
    return msgspec.field(default_factory=lambda: DatabaseUrl(name=getattr(project.current(), default)))


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings; the environment variable of a field is ``OUTBOX_`` and the field's name in capitals.

    `load` converts and validates values; the constructor takes them as they are.
    """

    home: Annotated[Path, "folder of everything that the commands write"] = _named("home")

    maven_mirror: Annotated[str | None, "URL of a mirror of Maven Central for the JVM parts"] = None

    source_db_url: Annotated[
        DatabaseUrl,
        "the service's database, without user and password; sslrootcert may be added; what is left out is as here",
    ] = _database("source_database")
    source_db_role_prefix: Annotated[RolePrefix, "prefix of its roles' names"] = _named("source_database")
    source_db_owner_password: Annotated[Secret, "role that migrates"] = EMPTY
    source_db_app_password: Annotated[Secret, "role of the service"] = EMPTY
    source_db_cdc_password: Annotated[Secret, "role of Debezium"] = EMPTY
    source_db_pruner_password: Annotated[Secret, "role that deletes relayed outbox rows"] = EMPTY
    source_db_auditor_password: Annotated[Secret, "role with which `outbox check` reads"] = EMPTY

    sink_db_url: Annotated[DatabaseUrl, "the sinks' database, likewise"] = _database("sink_database")
    sink_db_role_prefix: Annotated[RolePrefix, "prefix of its roles' names"] = _named("sink_database")
    sink_db_owner_password: Annotated[Secret, "role that migrates"] = EMPTY
    sink_db_writer_password: Annotated[Secret, "role of the sinks"] = EMPTY
    sink_db_pruner_password: Annotated[Secret, "role that deletes expired rows"] = EMPTY
    sink_db_auditor_password: Annotated[Secret, "role with which `outbox check` reads"] = EMPTY

    db_password_command: Annotated[
        str | None, "prints the password of role $PGUSER at $PGHOST:$PGPORT; it is run before each connection"
    ] = None

    kafka_bootstrap: Annotated[str, "comma-separated list of host:port"] = "127.0.0.1:9092"
    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    kafka_sasl_mechanism: Annotated[
        Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "AWS_MSK_IAM"],
        "OAUTHBEARER: a token of OpenID Connect; AWS_MSK_IAM: the credentials that Amazon's SDK finds",
    ] = "SCRAM-SHA-512"
    kafka_username: Annotated[str | None, "for OAUTHBEARER the client's id; none for AWS_MSK_IAM"] = None
    kafka_password: Annotated[Secret, "for OAUTHBEARER the client's secret"] = EMPTY
    kafka_cafile: Annotated[Path | None, "CA file (PEM) of the brokers, and of the token server"] = None
    kafka_token_url: Annotated[str | None, "the token endpoint of OAUTHBEARER (client credentials)"] = None
    kafka_token_scope: Annotated[str | None, "the scope to ask for there"] = None
    topic_prefix: Annotated[str, "first part of the names of the events' topics"] = _named("topic_prefix")
    topic_partitions: Annotated[Positive, "partitions of a topic, unless its aggregate.toml names another number"] = 4
    topic_retention_hours: Annotated[Positive, "how long the topics keep events"] = 168
    topic_replication: Annotated[Positive, "replication factor of the topics that we create"] = 1

    connect_url: Annotated[str, "Kafka Connect's REST interface"] = "http://127.0.0.1:8083"
    connect_username: Annotated[str | None, "basic auth of Connect's REST interface"] = None
    connect_password: Secret = EMPTY
    connect_cafile: Annotated[Path | None, "CA file of Connect's REST interface"] = None
    connector: Annotated[SlotName, "name of the connector and its slot"] = _named("connector")
    connector_poll_interval_ms: Annotated[
        Positive, "how long a poll of the connector collects events; a shorter time makes more work for an idle one"
    ] = 5
    connect_group_id: Annotated[str, "the worker's group.id"] = "outbox-connect"
    connect_offsets_topic: Annotated[str, "the worker's offset.storage.topic"] = "outbox.connect.offsets"
    connect_source_db_url: Annotated[
        DatabaseUrl | None, "the source database as seen from Connect: the parts of its URL that differ"
    ] = None
    connect_source_db_password_reference: Annotated[
        Annotated[str, Meta(pattern=r"^\$\{.+:.+\}\Z")] | None,
        "where Connect finds Debezium's password: a config provider of its worker, and a key there; "
        "default: in the password file of its driver (PGPASSFILE)",
    ] = None
    exactly_once: Annotated[bool, "the switch for Connect's exactly-once, in worker and connector"] = True

    service_bind: Annotated[
        str, "host:port of the service; the embedded stack takes another port if it is taken or 0"
    ] = "127.0.0.1:8080"
    service_workers: Annotated[Positive, "gunicorn worker processes"] = 2
    service_threads: Annotated[Positive, "threads per worker, and database connections per worker"] = 4
    service_request_timeout_s: Annotated[
        Annotated[float, Meta(gt=0)], "how long a request may take to arrive, and a response to be read"
    ] = 10
    service_token: Annotated[Secret, "bearer token that clients of the service send"] = EMPTY
    idempotency_ttl_hours: Annotated[Positive, "how long an Idempotency-Key is remembered"] = 24

    sink_storage: Annotated[
        str | None, "URI below which sinks keep Spark checkpoints and Delta tables; default: the home folder"
    ] = None
    sink_max_offsets_per_trigger: Annotated[
        Positive, "maximum number of records in one micro-batch, and in each part of an earlier one"
    ] = 500_000
    sink_trigger_interval_ms: Annotated[
        Count, "a micro-batch begins at most this often, which saves CPU; 0: as soon as there are events"
    ] = 0
    sink_id_age_max_days: Annotated[
        Positive, "how far the time in an event's id may be behind its record; older ones are set aside"
    ] = 3660
    spark_master: Annotated[
        str | None, "where the sinks' tasks run: a Spark cluster's master; default: local[2], in the sinks' process"
    ] = None
    spark_properties: Annotated[
        Path | None, "file of further Spark properties, like spark-defaults.conf; those that we need win"
    ] = None
    sink_driver_memory: Annotated[str, "heap of the Spark driver"] = "768m"
    sink_metrics: Annotated[
        str | None, "host:port of the sinks' metrics and health, for example 127.0.0.1:9400; default: none"
    ] = None

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Annotated[Literal["auto", "text", "json"], "auto: text on a terminal, else json"] = "auto"

    def replace(self, **changes: Any) -> Settings:
        """A copy with other values of some settings, which are not validated."""
        return msgspec.structs.replace(self, **changes)

    def as_env(self) -> dict[str, str]:
        """All settings as environment variables, secrets included, for a process that must read the same settings."""
        return {
            variable(name): str(value.get_secret_value() if isinstance(value, Secret) else value)
            for name, value in msgspec.structs.asdict(self).items()
            if value is not None
        }

    def without_secrets(self, *keep: str) -> Settings:
        """The settings without passwords and tokens but the given ones, for a process that needs no others."""
        return self.replace(**dict.fromkeys(SECRET_NAMES.difference(keep), EMPTY))

    @property
    def stack_env_file(self) -> Path:
        """Where the embedded stack keeps the ports it chose and the passwords it generated (mode 600)."""
        return self.home / "stack.env"

    def is_embedded(self, name: str) -> bool:
        """Whether a setting is what the embedded stack chose, or, before it chose, what is so by default."""
        chosen = stack_env(self.stack_env_file).get(variable(name))
        return str(getattr(self, name)) == (chosen or str(_default(FIELDS[name])))

    @property
    def service_url(self) -> str:
        """Where clients on this host reach the service."""
        return f"http://{self.service_bind}"

    @property
    def markers_topic(self) -> str:
        """The aggregate type and the topic of the rows that `outbox prune` sends through the relay; nobody reads it."""
        return f"{self.connector}.markers"

    @property
    def connect_login(self) -> tuple[str, str] | None:
        """The login at Connect's REST interface, if it asks for one."""
        name = self.connect_username
        return None if name is None else (name, self.connect_password.get_secret_value())

    def role_name(self, role: Role) -> str:
        return f"{getattr(self, f'{role_database(role)}_role_prefix')}_{role.value}"

    def dsn(self, role: Role) -> dict[str, str | int]:
        """libpq connection parameters of a role, in the database that the role belongs to."""
        url: DatabaseUrl = getattr(self, f"{role_database(role)}_url")
        password: Secret = getattr(self, password_setting(role))
        parameters: dict[str, str | int] = {
            "host": url.host,
            "port": url.port,
            "dbname": url.name,
            "user": self.role_name(role),
            "password": password.get_secret_value(),
            "sslmode": url.sslmode,
        }
        if url.sslmode != "verify-full":
            # A process that has taken the server's port gets no password: with SCRAM it stays here, and both sides show
            # that they know it. A server whose certificate is checked may ask in other ways.
            parameters["require_auth"] = SCRAM
        if url.sslrootcert is not None:
            parameters["sslrootcert"] = str(url.sslrootcert)
        return parameters

    @property
    def checkpoints(self) -> str:
        """The URI under which each sink keeps its Spark checkpoint."""
        return f"{self._storage}/checkpoints"

    @property
    def lakehouse(self) -> str:
        """The URI under which each sink that is a Delta table has it."""
        return f"{self._storage}/lakehouse"

    @property
    def _storage(self) -> str:
        """As Hadoop reads it: nothing is percent-encoded, a space in a path is a space."""
        return (self.sink_storage or f"file://{self.home}").rstrip("/")


FIELDS = {field.name: field for field in msgspec.structs.fields(Settings)}
SECRET_NAMES = frozenset(name for name, field in FIELDS.items() if isinstance(field.default, Secret))
OAUTHBEARER, MSK_IAM = "OAUTHBEARER", "AWS_MSK_IAM"


def variable(setting: str) -> str:
    return f"{PREFIX}{setting.upper()}"


def stack_env(file: Path) -> dict[str, str]:
    """The variables of a file that a stack has written; none if there is no file. Nothing in a value is replaced."""
    return {name: value or "" for name, value in dotenv_values(file, interpolate=False).items()}


def address(text: str) -> tuple[str, int]:
    """Host and port of a text like 127.0.0.1:8080 or [::1]:8080. Raises ValueError for another text."""
    with suppress(ValueError):
        parts = urlsplit(f"//{text}")
        if parts.netloc == text and "@" not in text and parts.hostname and parts.port is not None:
            return parts.hostname, parts.port
    raise ValueError("Expected host:port")


def role_database(role: Role) -> Literal["source_db", "sink_db"]:
    """How the settings of the role's database begin."""
    return "source_db" if isinstance(role, SourceRole) else "sink_db"


def password_setting(role: Role) -> str:
    return f"{role_database(role)}_{role.value}_password"


def load(home: Path | None = None, *, environment: bool = True, defaults: Any = None, **overrides: Any) -> Settings:
    """Read the settings, of the given home folder or of the one that the environment or ``.env`` names.

    ``environment=False`` leaves the environment and ``.env`` out: what runs on a stack of its own must not reach
    another because somebody's shell points there. ``overrides`` are settings by name that win over everything;
    ``defaults`` replace the defaults below, and everything wins over them.
    Raises Failure naming each setting that is wrong, and each variable that is no setting.
    """
    names = project.current()
    dotenv = Path(os.environ.get(DOTENV, names.root / ".env"))
    wrong: list[str] = []
    try:
        if not environment:
            found = (home or names.home).resolve()
            given = _given(stack_env(found / "stack.env"))
        else:
            in_dotenv = dotenv_values(dotenv)
            wrong += _unknown("the environment", os.environ)
            wrong += _unknown(dotenv, in_dotenv)
            given = {**_given(in_dotenv), **_given(os.environ)}
            found = (home or Path(given.get("home", names.home))).resolve()
            chosen = stack_env(found / "stack.env")
            wrong += _unknown(found / "stack.env", chosen)
            given = {**_given(chosen), **_logins_of_others(_given(chosen), given), **given}
        loaded, refused = _parsed({**(defaults or {}), **given, "home": found, **overrides})
        wrong += refused
    except OSError as error:
        raise Failure(
            f"settings: {error}",
            "run as the user who owns the file, or name another OUTBOX_HOME",
            code="settings-unreadable",
        ) from None
    if wrong:
        raise _wrong(wrong, dotenv.name)
    return loaded


def _parsed(given: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """Settings of the given values, and why values were refused. Other defaults than the project's names are valid."""
    values: dict[str, Any] = {}
    refused: list[str] = []
    for name, field in FIELDS.items():
        if name not in given and field.default is not msgspec.NODEFAULT:
            continue
        default = _default(field)
        try:
            if name in URLS:
                base = values.get("source_db_url", DatabaseUrl()) if default is None else default
                value: Any = _url(given.get(name, base), base)
            else:
                value = _converted(given.get(name, default), field.type)
            _check(name, value)
            values[name] = value
        except ValueError as error:
            refused.append(f"{variable(name)}: {error}")
    parsed = Settings(**values)
    return parsed, refused or [*_contradictions(parsed)]


def _default(field: FieldInfo) -> Any:
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


def _url(value: DatabaseUrl | str, base: DatabaseUrl) -> DatabaseUrl:
    """A URL; parts that a text leaves out are those of ``base``. Raises ValueError without the text."""
    if isinstance(value, str):
        try:
            given = extensions.parse_dsn(value) if value.startswith("postgresql://") else {}
        except psycopg2.ProgrammingError:
            given = {}
        if given.keys() & {"user", "password"}:
            raise ValueError("take user and password out: they are settings of their own")
        if "dbname" in given:
            given["name"] = given.pop("dbname")
        if not given or not given.keys() <= msgspec.structs.asdict(base).keys():
            raise ValueError("Expected postgresql://host:port/name, and of options sslmode and sslrootcert")
        value = base.replace(**given)
    url: DatabaseUrl = _converted(msgspec.structs.asdict(value), DatabaseUrl)
    return url


def _converted(value: Any, kind: Any) -> Any:
    """A value of the type. Raises ValueError without the value, which may be a secret in the wrong variable."""
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(plain) is Literal and value not in get_args(plain):
        raise ValueError(f"Expected one of {', '.join(get_args(plain))}")
    try:
        return msgspec.convert(value, kind, strict=False, dec_hook=lambda of, it: it if isinstance(it, of) else of(it))
    except msgspec.ValidationError as error:
        raise ValueError(str(error).partition(", got ")[0]) from None


def _contradictions(settings: Settings) -> Iterator[str]:
    """Settings that do not go together. A login of Kafka has what its mechanism needs, and nothing else: a client
    without SASL ignores a name silently. Two databases of one server have roles of different names.
    """
    protocol = settings.kafka_security_protocol
    mechanism = settings.kafka_sasl_mechanism if protocol.startswith("SASL") else ""
    who = f"{PREFIX}KAFKA_SECURITY_PROTOCOL {protocol}" + (f" with {mechanism}" if mechanism else "")
    needs = {"kafka_username": mechanism not in ("", MSK_IAM), "kafka_token_url": mechanism == OAUTHBEARER}
    for name, is_needed in needs.items():
        if (getattr(settings, name) is not None) is not is_needed:
            verb = "needs" if is_needed else "takes no"
            yield f"{variable(name)}: {who} {verb} {name.rpartition('_')[2]}"
    source, sink = settings.source_db_url.server, settings.sink_db_url.server
    if source == sink and settings.source_db_role_prefix == settings.sink_db_role_prefix:
        yield f"{variable('sink_db_role_prefix')}: the roles of both databases would have the same names on one server"


def _check(name: str, value: Any) -> None:
    """Raises ValueError for a value that has the right type and is wrong."""
    if value is None:
        return
    if name in ADDRESSES:
        address(value)
    elif name in FILES:
        file = value.sslrootcert if isinstance(value, DatabaseUrl) else value
        if not (file is None or file.is_file() or (file == SYSTEM_ROOTS and name in URLS)):
            raise ValueError(f"there is no file {file}")  # once, not by each client in words of its own
    elif name in LOGIN_URLS and "@" in urlsplit(value).netloc:  # an address is shown in messages, and passed on
        login = f"{PREFIX}{name.partition('_')[0].upper()}"
        raise ValueError(f"take user and password out: {login}_USERNAME, {login}_PASSWORD")
    elif name == "sink_storage" and urlsplit(value).password is not None:
        raise ValueError(f"take the password out; it belongs into the file of {PREFIX}SPARK_PROPERTIES")
    elif name == "sink_driver_memory":
        size = re.fullmatch(r"(\d+)([mg])", value, re.IGNORECASE)
        if size is None or int(size[1]) * (1024 if size[2] in "gG" else 1) < DRIVER_MEMORY_MIN_MIB:
            raise ValueError(f"a number of m or g, as 768m or 2g; {DRIVER_MEMORY_MIN_MIB}m at the least")


def _given(variables: Mapping[str, str | None]) -> dict[str, str]:
    """The settings among variables. An empty variable stands for the default."""
    return {name: value for name in FIELDS if (value := variables.get(variable(name)))}


def _logins_of_others(chosen: Mapping[str, str], given: Mapping[str, str]) -> dict[str, Any]:
    """Defaults in place of the logins that the embedded stack chose, for servers at other addresses."""
    names: list[str] = []
    for address, login in LOGINS.items():
        own = chosen.get(address)
        if own and given.get(address, own) != own:  # docker-compose's file has logins alone
            names += login
    return {name: FIELDS[name].default for name in names}


def require_known(environment: Mapping[str, str]) -> None:
    """Raises Failure naming each variable of a container that looks like a setting but is not one."""
    if wrong := [*_unknown(".env", environment)]:
        raise _wrong(wrong, ".env")


def _wrong(problems: Sequence[str], dotenv: str) -> Failure:
    return Failure(
        f"wrong settings: {'; '.join(problems)}",
        f"correct the environment variable, {dotenv} or stack.env; the default of a name is in pyproject.toml",
        code="settings-wrong",
    )


def _unknown(place: str | Path, names: Iterable[str]) -> Iterator[str]:
    """Each variable that looks like a setting but is not one, with the setting that the user may mean.

    Without this a misspelled setting would have no effect, and nobody would notice.
    """
    known = {variable(name) for name in FIELDS}
    for name in names:
        if name.upper().startswith(PREFIX) and name not in known and name not in READ_ELSEWHERE:
            [nearest] = difflib.get_close_matches(name.upper(), sorted(known), n=1, cutoff=0)
            yield f"{name} in {place}: there is no such setting; {nearest} is the nearest"
