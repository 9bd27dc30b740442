"""The schemas of events in a schema registry, by the REST API that Confluent's and others speak.

Each version of an event has a subject of its own, such as ``shop.order-order.placed.v1``: topic and record name, as
Confluent's TopicRecordNameStrategy has it. The record name is also the title of the published schema, from which that
strategy takes it. One subject for all versions would not do: versions are declared because they are not compatible,
and an older one may still be edited in a compatible way.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import requests

from outbox.base.errors import Failure
from outbox.events.catalog import Aggregate, Catalog
from outbox.events.schema import EventSchema, shortened

REQUEST_TIMEOUT_S = 20.0
URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?")  # without a login
USER, TOKEN = "SCHEMA_REGISTRY_USER_INFO", "SCHEMA_REGISTRY_TOKEN"
MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"
NOT_FOUND, FROM_SERVER = "404", 500

Login = Callable[[requests.PreparedRequest], requests.PreparedRequest]  # adds a header to a request


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


def login(variables: Mapping[str, str]) -> Login | None:
    """The login in the environment, if there is one. Raises Failure `registry-login-wrong`, which repeats no value."""
    user, token = variables.get(USER, "").strip(), variables.get(TOKEN, "").strip()
    is_text = f"{user}{token}".isprintable() and token.isascii()
    if not is_text or (user and token) or (user and ":" not in user):
        raise Failure(
            f"{USER} and {TOKEN} are no login",
            f"set {USER}=NAME:PASSWORD, or {TOKEN} to a token, or none of them",
            code="registry-login-wrong",
        )
    header = f"Bearer {token}" if token else f"Basic {base64.b64encode(user.encode()).decode()}"

    def add(request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = header  # a file `.netrc` does not replace it
        return request

    return add if user or token else None


class Registry:
    """A schema registry.

    Raises Failure if its URL is wrong, if it is unavailable or does not answer in time, if it refuses the login, and if
    it is no registry.
    """

    def __init__(self, url: str, login: Login | None) -> None:
        if not URL.fullmatch(url):
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
        return "version" in self._post(f"/subjects/{subject.name}", subject, expected="version")

    def incompatibility(self, subject: Subject) -> str:
        """The reason why the registry would refuse a schema; empty if it would take it, or has no such subject."""
        path = f"/compatibility/subjects/{subject.name}/versions/latest?verbose=true"
        answer = self._post(path, subject, expected="is_compatible")
        if "error_code" in answer:
            return "" if str(answer["error_code"]).startswith(NOT_FOUND) else _reason(answer)
        messages = [] if answer["is_compatible"] else answer.get("messages") or ["it is not compatible"]
        return _line("; ".join(map(str, messages)))

    def register(self, subject: Subject) -> str:
        """Register a schema as the subject's newest one. Returns the reason if the registry refuses it, or nothing."""
        answer = self._post(f"/subjects/{subject.name}/versions", subject, expected="id")
        return _reason(answer) if "error_code" in answer else ""

    def _post(self, path: str, subject: Subject, expected: str) -> dict[str, Any]:
        """The answer to a schema: an object with the member that is expected, or with an ``error_code``."""
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
        answer = _object(response)
        if response.status_code >= FROM_SERVER:
            raise self._unavailable(f"{response.status_code} {_reason(answer)}")
        if (expected if response.ok else "error_code") not in answer:
            raise Failure(
                f"{self.url} answers {response.status_code} as no schema registry does",
                "name the URL before /subjects: http://HOST:8081, or http://HOST:8080/apis/ccompat/v7 of Apicurio",
                code="registry-foreign",
            )
        return answer

    def _unavailable(self, reason: str) -> Failure:
        return Failure(
            f"the registry {self.url} is unavailable: {reason}",
            "start it, or correct its URL",
            code="registry-unavailable",
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
    is_tried = dry_run or any(reasons.values())
    for subject in lacking:
        reason = reasons[subject.name] if is_tried else registry.register(subject)
        yield Result("refused" if reason else "new" if is_tried else "published", subject.name, reason)


def _object(response: requests.Response) -> dict[str, Any]:
    """The JSON object of an answer; empty without one."""
    try:
        found = response.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _reason(answer: Mapping[str, Any]) -> str:
    return _line(str(answer.get("message") or "without a reason"))


def _line(text: str) -> str:
    return shortened(" ".join(text.split()))


def _cause(error: BaseException) -> str:
    """The innermost error that requests and urllib3 have wrapped, in its words."""
    inner = getattr(error, "reason", None) or next((one for one in error.args if isinstance(one, Exception)), None)
    return _cause(inner) if isinstance(inner, Exception) else _line(str(error))
