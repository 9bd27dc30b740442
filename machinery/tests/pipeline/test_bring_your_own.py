"""Postgres, Kafka and Connect of somebody else: reached by settings alone, and each wrong one told with its remedy.

Every command runs as a user runs it: settings by the environment, in a home where no stack of ours was ever in.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from outbox_lab.testing.command import outbox
from outbox_lab.testing.homes import Homes
from tests.stock import audit, move, serving
from tests.support.secured import Secured, servers


@pytest.fixture(scope="module")
def secured(homes: Homes) -> Iterator[Secured]:
    with servers(homes.new("secured")) as made:
        yield made


@pytest.fixture(scope="module")
def relaying(secured: Secured) -> Iterator[Secured]:
    """Migrated, with the connector applied."""
    assert "applied" in succeed(secured, "migrate")
    assert "created, exactly-once" in succeed(secured, "connect", "apply")
    yield secured
    succeed(secured, "connect", "remove", "--drop-slot", "--yes")


def run(secured: Secured, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command with the settings of these servers, but for some."""
    done = outbox(*arguments, home=secured.settings.home, **{**secured.variables, **variables})
    told = done.stdout + done.stderr
    wrong = {value for name, value in variables.items() if name.endswith("_PASSWORD")}
    assert not [secret for secret in {*secured.secrets(), *wrong} if secret in told]
    assert "Traceback" not in told
    return done


def succeed(secured: Secured, *arguments: str) -> str:
    """Output of a command that succeeds."""
    done = run(secured, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_whole_chain_by_settings_alone(relaying: Secured) -> None:
    rendered = json.loads(succeed(relaying, "connect", "render"))
    assert rendered["database.sslmode"] == "verify-full"
    assert rendered["database.sslrootcert"] == str(relaying.certificates.authority)
    # Requests would let this variable win over a session's own authority.
    done = run(relaying, "connect", "status", REQUESTS_CA_BUNDLE=str(relaying.certificates.other))
    assert "exactly-once (transaction boundary poll)" in done.stdout
    status = json.loads(succeed(relaying, "connect", "status", "--json"))
    assert (status["connector"], status["tasks"], status["error"]) == ("RUNNING", ["RUNNING"], None)
    assert (status["worker_exactly_once"], status["connector_exactly_once"]) == (True, "required")
    assert "unchanged" in succeed(relaying, "connect", "apply")

    with serving(relaying.settings):
        assert move(relaying.settings, 700).status_code == 201
    assert audit(relaying.settings) == {}

    report = json.loads(succeed(relaying, "check", "--wait", "60", "--json"))
    total = report["total"]
    assert (total["outbox_events"], total["records"], total["in_flight"]) == (1, 1, 0)
    succeed(relaying, "sink", "--until-caught-up")
    (sink,) = json.loads(succeed(relaying, "check", "--json"))["sinks"]
    (compared,) = sink["comparisons"]
    assert (compared["drift"], sink["in_flight"], sink["parked"]) == ({}, 0, 0)
    succeed(relaying, "dead-letters", "list")
    assert "from offset 0, replaying" in succeed(relaying, "rewind", "dedup", "--to-earliest", "--yes")

    done = run(relaying, "doctor", "--json")
    wrong = [finding["code"] for finding in json.loads(done.stdout) if not finding["is_ok"]]
    assert wrong == ["sink-not-running"], "it has caught up and ended"


@pytest.mark.parametrize(
    ("arguments", "changed", "reason", "remedy"),
    [
        (
            "migrate",
            {"SOURCE_DB_URL": "sslrootcert=OTHER"},
            "certificate verify failed",
            "sslrootcert in OUTBOX_SOURCE_DB_URL",
        ),
        (
            "migrate",
            {"SOURCE_DB_URL": "host=localhost"},
            "does not match host name",
            "OUTBOX_SOURCE_DB_URL, or its host",
        ),
        ("migrate", {"SOURCE_DB_URL": "sslmode=disable"}, "no encryption", "set sslmode in OUTBOX_SOURCE_DB_URL"),
        # With "prefer", libpq tries again without TLS, and that is refused for another reason.
        (
            "migrate",
            {"SINK_DB_OWNER_PASSWORD": "not-it", "SINK_DB_URL": "sslmode=prefer"},
            "password authentication",
            "OUTBOX_SINK_DB_OWNER_PASSWORD",
        ),
        ("check", {"KAFKA_PASSWORD": "not-it"}, "invalid credentials", "OUTBOX_KAFKA_PASSWORD"),
        ("check", {"KAFKA_SASL_MECHANISM": "PLAIN"}, "Unsupported SASL mechanism", "OUTBOX_KAFKA_SASL_MECHANISM"),
        ("check", {"KAFKA_CAFILE": "OTHER"}, "certificate verify failed", "OUTBOX_KAFKA_CAFILE"),
        # A server that never answers is waited for.
        ("check", {"KAFKA_BOOTSTRAP": "127.0.0.1:1", "TIMEOUT_SCALE": "0.2"}, "refused", "OUTBOX_KAFKA_BOOTSTRAP"),
        (
            "check",
            {"KAFKA_SECURITY_PROTOCOL": "PLAINTEXT", "KAFKA_USERNAME": "", "TIMEOUT_SCALE": "0.2"},
            "Timed out",
            "OUTBOX_KAFKA_SECURITY_PROTOCOL",
        ),
        ("connect status", {"CONNECT_PASSWORD": "not-it"}, "401", "OUTBOX_CONNECT_PASSWORD"),
        ("connect status", {"CONNECT_CAFILE": ""}, "certificate verify failed", "OUTBOX_CONNECT_CAFILE"),
        ("connect status", {"CONNECT_URL": "http"}, "not HTTP", "OUTBOX_CONNECT_URL"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_a_wrong_setting_is_one_line_that_names_it(
    relaying: Secured, arguments: str, changed: dict[str, str], reason: str, remedy: str
) -> None:
    settings, authority = relaying.settings, str(relaying.certificates.other)
    values = {"OTHER": authority, "http": settings.connect_url.replace("https", "http")}

    def wrong(name: str, value: str) -> str:
        if name.endswith("_DB_URL"):  # the part of it that is wrong
            part, _, text = value.partition("=")
            return str(getattr(settings, name.lower()).replace(**{part: values.get(text, text)}))
        return values.get(value, value)

    variables = {f"OUTBOX_{name}": wrong(name, value) for name, value in changed.items()}
    done = run(relaying, *arguments.split(), **variables)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    told, _, what_to_do = line.partition(" — ")
    assert reason in told
    assert remedy in what_to_do
    assert "outbox up" not in what_to_do, "there is no stack of ours to start"


def test_checkpoints_that_cannot_be_are_one_line(relaying: Secured) -> None:
    done = run(relaying, "sink", "--until-caught-up", OUTBOX_SINK_STORAGE="nosuch://bucket")
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("outbox: checkpoint nosuch://bucket/checkpoints/dedup")
    assert line.endswith(" — correct OUTBOX_SINK_STORAGE")
