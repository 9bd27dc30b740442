"""Kafka clients: the options that reach the brokers, and client errors as failures."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from textwrap import shorten
from types import MappingProxyType
from typing import Any, Literal

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from outbox.base.errors import Failure
from outbox.base.settings import MSK_IAM, OAUTHBEARER, Settings
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
UNAUTHORIZED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
LOGIN_FAILED = "Failed to acquire SASL OAUTHBEARER token: "  # librdkafka's words; those of curl or the server follow
# The errors of RFC 6749 for a request that is wrong. Any other may pass.
TOKEN_REFUSED = re.compile(r"invalid_(request|client|grant|scope)|unauthorized_client|unsupported_grant_type")
MISSING = object()
OAUTH_JAVA = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
ALLOWED_URLS = "org.apache.kafka.sasl.oauthbearer.allowed.urls"  # Java's clients ask no others since Kafka 4
MSK_JAVA = "software.amazon.msk.auth.iam"
MSK_REMEDY = "give this process credentials of Amazon's SDK, whose policy allows kafka-cluster:Connect"
MSK_HOST = re.compile(r"\.kafka(?:-serverless)?\.([a-z0-9-]+)\.amazonaws\.com")


def client_config(settings: Settings) -> dict[str, Any]:
    """librdkafka's settings for reaching the brokers, for any client of confluent-kafka."""
    config: dict[str, Any] = {
        "bootstrap.servers": settings.kafka_bootstrap,
        "security.protocol": settings.kafka_security_protocol,
    }
    if settings.kafka_cafile is not None:
        config["ssl.ca.location"] = str(settings.kafka_cafile)
    return config | _login(settings)


def _login(settings: Settings) -> dict[str, Any]:
    """The settings with which librdkafka logs in, where the brokers ask for that. It asks for another token
    before one expires, in a thread of its own, and so does confluent-kafka with ``oauth_cb``.
    """
    if not settings.kafka_security_protocol.startswith("SASL"):
        return {}
    name, password = settings.kafka_username, settings.kafka_password.get_secret_value()
    match settings.kafka_sasl_mechanism:
        case "AWS_MSK_IAM":
            return {"sasl.mechanism": OAUTHBEARER, "oauth_cb": partial(_msk_token, _msk_region(settings))}
        case "OAUTHBEARER":
            config = {
                "sasl.mechanism": OAUTHBEARER,
                "sasl.oauthbearer.method": "oidc",
                "sasl.oauthbearer.token.endpoint.url": settings.kafka_token_url,
                "sasl.oauthbearer.client.id": name,
                "sasl.oauthbearer.client.secret": password,
                "sasl.oauthbearer.scope": settings.kafka_token_scope,
                "https.ca.location": settings.kafka_cafile and str(settings.kafka_cafile),
            }
            return {key: value for key, value in config.items() if value is not None}
    return {"sasl.mechanism": settings.kafka_sasl_mechanism, "sasl.username": name, "sasl.password": password}


def _msk_token(region: str, _: str = "") -> tuple[str, float]:
    """A token of Amazon MSK's, signed by the credentials that Amazon's SDK finds, and when it expires."""
    from aws_msk_iam_sasl_signer import MSKAuthTokenProvider

    token, expires_ms = MSKAuthTokenProvider.generate_auth_token(region)
    return token, expires_ms / 1000


def _msk_region(settings: Settings) -> str:
    """The region of a cluster of Amazon MSK: in the names of its brokers, or else of this process. Raises Failure if it
    is not known, or if no token can be signed: a client would wait for one in vain, and not say why.
    """
    found = MSK_HOST.search(settings.kafka_bootstrap)
    region = found[1] if found else os.environ.get("AWS_REGION")
    reason, remedy = "its name does not say the region", "set AWS_REGION, or correct OUTBOX_KAFKA_BOOTSTRAP"
    if region is not None:
        try:
            _msk_token(region)
            return region
        except ModuleNotFoundError as error:
            reason, remedy = f"{error}", "install the extra `msk` of outbox-machinery"
        except Exception as error:  # of Amazon's SDK; without any credentials, an AttributeError
            reason, remedy = f"Amazon's SDK finds no valid credentials: {type(error).__name__}: {error}", MSK_REMEDY
    raise Failure(f"{MSK_IAM} at {settings.kafka_bootstrap}: {reason}", remedy, code="kafka-login-refused")


def jaas(mechanism: str, username: str, password: str, **others: str) -> str:
    """The value of ``sasl.jaas.config``, by which a Java client logs in; ``others`` are further options."""
    module = "scram.ScramLoginModule" if mechanism.startswith("SCRAM") else "plain.PlainLoginModule"
    return _jaas(module, {"username": username, "password": password, **others})


def _jaas(module: str, options: Mapping[str, str]) -> str:
    escaped = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in options.items()}
    words = "".join(f' {name}="{value}"' for name, value in escaped.items())
    return f"org.apache.kafka.common.security.{module} required{words};"


def _java_login(settings: Settings) -> dict[str, str]:
    """The settings with which a Java client logs in, where the brokers ask for that."""
    if not settings.kafka_security_protocol.startswith("SASL"):
        return {}
    name, password = settings.kafka_username or "", settings.kafka_password.get_secret_value()
    mechanism = settings.kafka_sasl_mechanism
    login: dict[str, str] = {"sasl.mechanism": mechanism}
    match mechanism:
        case "AWS_MSK_IAM":
            login["sasl.jaas.config"] = f"{MSK_JAVA}.IAMLoginModule required;"
            login["sasl.client.callback.handler.class"] = f"{MSK_JAVA}.IAMClientCallbackHandler"
        case "OAUTHBEARER":
            options = {"clientId": name, "clientSecret": password}
            if settings.kafka_token_scope is not None:
                options["scope"] = settings.kafka_token_scope
            if settings.kafka_cafile is not None:
                options |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(settings.kafka_cafile)}
            login["sasl.jaas.config"] = _jaas("oauthbearer.OAuthBearerLoginModule", options)
            login["sasl.login.callback.handler.class"] = OAUTH_JAVA
            login["sasl.oauthbearer.token.endpoint.url"] = settings.kafka_token_url or ""
        case _:
            login["sasl.jaas.config"] = jaas(mechanism, name, password)
    return login


def spark_options(settings: Settings) -> dict[str, str]:
    """The settings for Spark's Kafka source, whose Java client uses other names."""
    options = {
        "bootstrap.servers": settings.kafka_bootstrap,
        "security.protocol": settings.kafka_security_protocol,
        **_java_login(settings),
    }
    if settings.kafka_cafile is not None:
        options["ssl.truststore.type"] = "PEM"
        options["ssl.truststore.location"] = str(settings.kafka_cafile)
    return {f"kafka.{name}": value for name, value in options.items()}


def request_timeout_s() -> float:
    """The deadline of one request to the brokers, scaled for slow machines."""
    return REQUEST_TIMEOUT_S * timeout_scale()


def consumer_config(settings: Settings, isolation_level: IsolationLevel) -> dict[str, Any]:
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
    with kafka_errors(settings):
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
        config = {**client_config(settings), "log_level": 0, "error_cb": errors.append}
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
        case KafkaError._AUTHENTICATION if settings.kafka_token_url is not None:
            return _no_token(settings, error.str())
        case KafkaError._AUTHENTICATION if settings.kafka_sasl_mechanism == MSK_IAM:
            code = "kafka-login-refused"
            remedy = MSK_REMEDY
        case KafkaError._AUTHENTICATION:
            code = "kafka-login-refused"
            remedy = "correct OUTBOX_KAFKA_USERNAME, OUTBOX_KAFKA_PASSWORD and OUTBOX_KAFKA_SASL_MECHANISM"
        case KafkaError._INVALID_ARG if settings.kafka_username and not settings.kafka_password.get_secret_value():
            code, remedy = "kafka-login-refused", "set OUTBOX_KAFKA_PASSWORD"
        case KafkaError._SSL | KafkaError._INVALID_ARG:
            code = "kafka-tls"
            remedy = (
                "correct OUTBOX_KAFKA_CAFILE, OUTBOX_KAFKA_SECURITY_PROTOCOL, or the host in OUTBOX_KAFKA_BOOTSTRAP: "
                "use a name in the brokers' certificates"
            )
        case code_ if code_ in UNAUTHORIZED:
            code = "kafka-not-authorized"
            remedy = f"grant it to {settings.kafka_username or 'the client'} in Kafka's access control lists"
        case KafkaError.TOPIC_EXCEPTION:  # a name that differs from another in `.` and `_` only
            code, remedy = "topic-refused", "choose another name"
        case _ if "refused" in error.str() and settings.is_embedded("kafka_bootstrap"):
            remedy = "`outbox up` starts the embedded one"
    return Failure(f"Kafka at {settings.kafka_bootstrap}: {error.str()}", remedy, code=code)


def _no_token(settings: Settings, said: str) -> Failure:
    """The failure of a login by a token: of the token server, or of the brokers that refuse its token."""
    where = f"the token server {settings.kafka_token_url}"
    what = shorten(said.removeprefix(LOGIN_FAILED), 300)  # it may be a page
    if not said.startswith(LOGIN_FAILED):
        return Failure(
            f"Kafka at {settings.kafka_bootstrap} refuses the token of {where}: {what}",
            "correct OUTBOX_KAFKA_TOKEN_SCOPE or the brokers' expected audience and issuer, or compare the clocks; "
            "the brokers' log says which",
            code="kafka-login-refused",
        )
    if "certificate" in what:
        return Failure(f"{where}: {what}", "correct OUTBOX_KAFKA_CAFILE, or OUTBOX_KAFKA_TOKEN_URL", code="kafka-tls")
    if "unexpired token" in what:
        return Failure(f"{where}: its token has expired: {what}", "compare its clock and ours", code="token-expired")
    if TOKEN_REFUSED.search(what):
        remedy = (
            "correct OUTBOX_KAFKA_USERNAME, OUTBOX_KAFKA_PASSWORD, OUTBOX_KAFKA_TOKEN_SCOPE and OUTBOX_KAFKA_TOKEN_URL"
        )
        return Failure(f"{where} refuses the login: {what}", remedy, code="kafka-login-refused")
    remedy = "start it, or correct OUTBOX_KAFKA_TOKEN_URL; nothing is lost meanwhile"
    return Failure(f"{where} is unavailable: {what}", remedy, code="token-server-unavailable")
