"""The schemas of events in a schema registry, by the REST API that Confluent's and others speak.

Each version of an event has a subject of its own, such as ``shop.order-order.placed.v1``: topic and record name, as
Confluent's TopicRecordNameStrategy has it. The record name is also the title of the published schema, from which that
strategy takes it. One subject for all versions would not do: versions are declared because they are not compatible,
and an older one may still be edited in a compatible way.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import requests
from requests.auth import AuthBase

from outbox.base.errors import Failure
from outbox.events.catalog import Aggregate, Catalog
from outbox.events.schema import EventSchema, shortened

REQUEST_TIMEOUT_S = 20.0
USER, TOKEN = "SCHEMA_REGISTRY_USER_INFO", "SCHEMA_REGISTRY_TOKEN"
MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"
UNKNOWN_SUBJECT, UNKNOWN_SCHEMA = 40401, 40403
FROM_SERVER = 500


class Subject(NamedTuple):
    """A subject, and the schema that it is to have."""

    name: str
    schema: str

    @classmethod
    def of(cls, schema: EventSchema, aggregate: Aggregate) -> Subject:
        """The subject of a version of an event. Examples are left out: to edit one changes no contract."""
        document = {**schema.document, "title": schema.name}
        document.pop("examples", None)
        return cls(f"{aggregate.topic}-{schema.name}", json.dumps(document))


class Result(NamedTuple):
    """What became of a subject: ``unchanged``, ``new``, ``published`` or ``refused``; ``new`` is not published yet."""

    status: str
    subject: str
    reason: str = ""
    """The registry's own, if it was refused."""


def login(variables: Mapping[str, str]) -> AuthBase | None:
    """The login in the environment, if there is one. Raises Failure `registry-login-wrong`, which repeats no value."""
    user, token = variables.get(USER, "").strip(), variables.get(TOKEN, "").strip()
    if (
        (user and ":" not in user)
        or (user and token)
        or not (user.isprintable() and token.isascii() and token.isprintable())
    ):
        raise Failure(
            f"{USER} and {TOKEN} are no login",
            f"set {USER}=NAME:PASSWORD, or {TOKEN} to a token, or none of them",
            code="registry-login-wrong",
        )
    encoded = base64.b64encode(user.encode()).decode()
    return Login(f"Bearer {token}" if token else f"Basic {encoded}") if user or token else None


class Login(AuthBase):
    """A header that each request gets; a file ``.netrc`` does not replace it."""

    def __init__(self, header: str) -> None:
        self._header = header

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = self._header
        return request


class Registry:
    """A schema registry.

    Raises Failure if its URL is wrong, if it is unavailable or does not answer in time, if it refuses the login, and if
    it is no registry.
    """

    def __init__(self, url: str, login: AuthBase | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
            raise Failure(
                "the URL of the registry is wrong, or has a login",  # so it is not repeated
                f"write it as https://HOST/PATH; the login is in {USER} or {TOKEN}",
                code="registry-url-wrong",
            )
        self.url = url.rstrip("/")
        self._session = requests.Session()
        self._session.headers.update({"Content-Type": MEDIA_TYPE, "Accept": f"{MEDIA_TYPE}, application/json"})
        self._session.auth = login

    def has(self, subject: Subject) -> bool:
        """Whether a subject has this schema already, in whatever version."""
        response = self._post(f"/subjects/{subject.name}", subject)
        if response.ok:
            return True
        if _body(response).get("error_code") in (UNKNOWN_SUBJECT, UNKNOWN_SCHEMA):
            return False
        raise self._foreign(response)

    def incompatibility(self, subject: Subject) -> str:
        """The reason why the registry would refuse a schema; empty if it would take it."""
        response = self._post(f"/compatibility/subjects/{subject.name}/versions/latest?verbose=true", subject)
        body = _body(response)
        if response.ok and body.get("is_compatible") is False:
            return _line("; ".join(map(str, body.get("messages") or ())) or "it is not compatible")
        return "" if response.ok or body.get("error_code") == UNKNOWN_SUBJECT else _reason(response)

    def register(self, subject: Subject) -> str:
        """Register a schema as the subject's newest one. Returns the reason if the registry refuses it, or nothing."""
        response = self._post(f"/subjects/{subject.name}/versions", subject)
        return "" if response.ok else _reason(response)

    def _post(self, path: str, subject: Subject) -> requests.Response:
        body = {"schemaType": "JSON", "schema": subject.schema}
        try:
            response = self._session.post(
                f"{self.url}{path}", json=body, timeout=REQUEST_TIMEOUT_S, allow_redirects=False
            )
        except requests.Timeout:
            raise self._unavailable(f"no answer in {REQUEST_TIMEOUT_S:g} s") from None
        except requests.RequestException as error:
            raise self._unavailable(_cause(error)) from None
        if response.status_code in (requests.codes.unauthorized, requests.codes.forbidden):
            raise Failure(
                f"the registry {self.url} refuses the login: {response.status_code}",
                f"set {USER}=NAME:PASSWORD, or {TOKEN}, of a user who may write to {subject.name}",
                code="registry-login-refused",
            )
        if response.status_code >= FROM_SERVER:
            raise self._unavailable(f"{response.status_code} {_reason(response)}")
        if response.is_redirect:
            raise self._foreign(response)
        return response

    def _unavailable(self, reason: str) -> Failure:
        return Failure(
            f"the registry {self.url} is unavailable: {reason}",
            "start it, or correct its URL",
            code="registry-unavailable",
        )

    def _foreign(self, response: requests.Response) -> Failure:
        return Failure(
            f"{self.url} answers {response.status_code} as no schema registry does",
            "name the URL before /subjects, such as http://HOST:8081, or http://HOST:8080/apis/ccompat/v7 of Apicurio",
            code="registry-foreign",
        )


def subjects(known: Catalog) -> list[Subject]:
    """The subjects of all published events, the older versions first."""
    return [
        Subject.of(schema, aggregate)
        for aggregate in known.aggregates.values()
        if aggregate.published
        for schema in aggregate.schemas
    ]


def publish(registry: Registry, wanted: Sequence[Subject], *, dry_run: bool, check: bool) -> Iterator[Result]:
    """Register what the registry lacks. Each result follows what it says.

    ``check``: ask first whether everything is compatible, and if something is not, register nothing.
    """
    lacking = []
    for subject in wanted:
        if registry.has(subject):
            yield Result("unchanged", subject.name)
        else:
            lacking.append(subject)
    reasons = {subject.name: registry.incompatibility(subject) if check else "" for subject in lacking}
    for subject in lacking:
        reason = reasons[subject.name]
        if not (dry_run or any(reasons.values())):
            reason = registry.register(subject)
            yield Result("refused" if reason else "published", subject.name, reason)
        else:
            yield Result("refused" if reason else "new", subject.name, reason)


def _body(response: requests.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _reason(response: requests.Response) -> str:
    return _line(str(_body(response).get("message") or f"status {response.status_code} without a reason"))


def _line(text: str) -> str:
    return shortened(" ".join(text.split()))


def _cause(error: BaseException) -> str:
    """The innermost error that requests and urllib3 have wrapped, in its words."""
    inner = getattr(error, "reason", None) or next((one for one in error.args if isinstance(one, Exception)), None)
    return _cause(inner) if isinstance(inner, Exception) else _line(str(error))
