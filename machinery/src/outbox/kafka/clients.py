"""Kafka clients: the options that reach the brokers, and client errors as failures."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import timeout_scale

IsolationLevel = Literal["read_committed", "read_uncommitted"]
REQUEST_TIMEOUT_S = 10.0
POLL_S = 0.1
# A consumer fetches ahead until it has so many records, or values of so many KiB. It does not count keys and headers,
# so let it be few records: a fetch brings 1 MiB of each partition anyway.
AHEAD_RECORDS = 100
AHEAD_MAX_KIB = 8 << 10
FETCH_BACKOFF_MS = 10  # when so much is fetched ahead; the default is a second
# Retrying cannot help: the configuration is wrong.
HOPELESS = {KafkaError._AUTHENTICATION, KafkaError._SSL}
MISSING = object()


def client_config(settings: Settings) -> dict[str, str | int | float | bool]:
    """librdkafka's settings for reaching the brokers, for any client of confluent-kafka."""
    config: dict[str, str | int | float | bool] = {
        "bootstrap.servers": settings.kafka_bootstrap,
        "security.protocol": settings.kafka_security_protocol,
    }
    if settings.kafka_cafile is not None:
        config["ssl.ca.location"] = str(settings.kafka_cafile)
    if settings.kafka_username is not None:
        config["sasl.mechanism"] = settings.kafka_sasl_mechanism
        config["sasl.username"] = settings.kafka_username
        config["sasl.password"] = settings.kafka_password.get_secret_value()
    return config


def jaas(mechanism: str, username: str, password: str, **others: str) -> str:
    """The value of ``sasl.jaas.config``, by which a Java client logs in; ``others`` are further options."""
    module = "scram.ScramLoginModule" if mechanism.startswith("SCRAM") else "plain.PlainLoginModule"
    options = {"username": username, "password": password, **others}
    login = " ".join(f"{name}={_quoted(value)}" for name, value in options.items())
    return f"org.apache.kafka.common.security.{module} required {login};"


def spark_options(settings: Settings) -> dict[str, str]:
    """The settings for Spark's Kafka source, whose Java client uses other names."""
    options = {
        "kafka.bootstrap.servers": settings.kafka_bootstrap,
        "kafka.security.protocol": settings.kafka_security_protocol,
    }
    if settings.kafka_cafile is not None:
        options["kafka.ssl.truststore.type"] = "PEM"
        options["kafka.ssl.truststore.location"] = str(settings.kafka_cafile)
    if settings.kafka_username is not None:
        mechanism, password = settings.kafka_sasl_mechanism, settings.kafka_password.get_secret_value()
        options["kafka.sasl.mechanism"] = mechanism
        options["kafka.sasl.jaas.config"] = jaas(mechanism, settings.kafka_username, password)
    return options


def request_timeout_s() -> float:
    """The deadline of one request to the brokers, scaled for slow machines."""
    return REQUEST_TIMEOUT_S * timeout_scale()


def consumer_config(settings: Settings, isolation_level: IsolationLevel) -> dict[str, str | int | float | bool]:
    """The settings of a consumer that belongs to no group and commits nothing."""
    return {
        **client_config(settings),
        "group.id": f"outbox-{uuid.uuid4()}",
        "isolation.level": isolation_level,
        "enable.auto.commit": False,
        "fetch.wait.max.ms": 20,
        "queued.min.messages": AHEAD_RECORDS,
        "queued.max.messages.kbytes": AHEAD_MAX_KIB,
        "fetch.queue.backoff.ms": FETCH_BACKOFF_MS,
        "log_level": 0,  # errors are raised; closing during a login would also print one
    }


@contextmanager
def consumer(
    settings: Settings,
    isolation_level: IsolationLevel = "read_committed",
    others: Mapping[str, str | bool] = MappingProxyType({}),
) -> Iterator[Consumer]:
    """A consumer that belongs to no group and commits nothing; ``others`` are further settings of librdkafka. Kafka's
    errors inside the block become Failure.
    """
    made = Consumer({**consumer_config(settings, isolation_level), "auto.offset.reset": "earliest", **others})
    try:
        with kafka_errors(settings):
            yield made
    finally:
        made.close()


@contextmanager
def kafka_errors(settings: Settings) -> Iterator[None]:
    try:
        yield
    except KafkaException as error:
        raise unavailable(settings, error.args[0]) from error


class Admin:
    """An admin client that fails at once where retrying cannot help.

    librdkafka retries every error until the deadline and then reports a timeout. It passes the cause to ``error_cb``.
    Raises Failure if the settings are no valid configuration, such as a CA file without a certificate.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # The callback refers to this list and not to us: a reference cycle would keep the client's threads alive.
        errors: list[KafkaError] = []
        self._errors = errors
        config: dict[str, Any] = {**client_config(settings), "log_level": 0, "error_cb": errors.append}
        try:
            self.client = AdminClient(config)
        except KafkaException as error:
            raise unavailable(settings, error.args[0]) from None

    def result(self, request: Future[Any], missing: int | None = None) -> Any:
        """The result of a request, or MISSING if Kafka answers with this error code. Raises Failure for any other."""
        while not request.done():
            self.client.poll(POLL_S)
            for error in self._errors:
                if error.code() in HOPELESS:
                    raise unavailable(self._settings, error)
        try:
            return request.result()
        except KafkaException as error:
            answer: KafkaError = error.args[0]
            if answer.code() == missing:
                return MISSING
            causes = [each for each in self._errors if each.code() != KafkaError._ALL_BROKERS_DOWN]
            is_late = answer.code() == KafkaError._TIMED_OUT
            raise unavailable(self._settings, causes[-1] if is_late and causes else answer) from error


def unavailable(settings: Settings, error: KafkaError) -> Failure:
    code, remedy = "kafka-unavailable", "start it, or correct OUTBOX_KAFKA_BOOTSTRAP and OUTBOX_KAFKA_SECURITY_PROTOCOL"
    match error.code():
        case KafkaError._AUTHENTICATION:
            code = "kafka-login-refused"
            remedy = "correct OUTBOX_KAFKA_USERNAME, OUTBOX_KAFKA_PASSWORD and OUTBOX_KAFKA_SASL_MECHANISM"
        case KafkaError._SSL | KafkaError._INVALID_ARG:
            code = "kafka-tls"
            remedy = (
                "correct OUTBOX_KAFKA_CAFILE, OUTBOX_KAFKA_SECURITY_PROTOCOL, or the host in OUTBOX_KAFKA_BOOTSTRAP: "
                "use a name in the brokers' certificates"
            )
        case KafkaError.TOPIC_AUTHORIZATION_FAILED | KafkaError.CLUSTER_AUTHORIZATION_FAILED:
            code = "kafka-not-authorized"
            remedy = f"grant it to {settings.kafka_username or 'the client'} in Kafka's access control lists"
        case KafkaError.TOPIC_EXCEPTION:  # a name that differs from another in `.` and `_` only
            code, remedy = "topic-refused", "choose another name"
        case _ if "refused" in error.str() and settings.is_embedded("kafka_bootstrap"):
            remedy = "`outbox up` starts the embedded one"
    return Failure(f"Kafka at {settings.kafka_bootstrap}: {error.str()}", remedy, code=code)


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
