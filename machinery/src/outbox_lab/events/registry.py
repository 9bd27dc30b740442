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
from collections.abc import Callable, Mapping
from typing import Any

import requests

from outbox.base.errors import Failure
from outbox.events.catalog import Catalog
from outbox.events.schema import shortened

REQUEST_TIMEOUT_S = 20.0
URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#@]*)?")  # without a login
USER, TOKEN = "SCHEMA_REGISTRY_USER_INFO", "SCHEMA_REGISTRY_TOKEN"
MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"
FROM_SERVER = 500

Login = Callable[[requests.PreparedRequest], requests.PreparedRequest]  # adds a header to a request


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

    def register(self, subject: str, schema: str) -> str:
        """Register a schema as the subject's newest one. Returns the reason of a registry that refuses it, or nothing.

        A registry makes no new version of a schema that the subject has already.
        """
        path, content = f"{self.url}/subjects/{subject}/versions", {"schemaType": "JSON", "schema": schema}
        try:
            response = self._session.post(path, json=content, timeout=REQUEST_TIMEOUT_S, allow_redirects=False)
        except requests.Timeout:
            raise self._unavailable(f"no answer in {REQUEST_TIMEOUT_S:g} s") from None
        except requests.RequestException as error:
            raise self._unavailable(_cause(error)) from None
        status, answer = response.status_code, _answer(response)
        if status in (requests.codes.unauthorized, requests.codes.forbidden):
            remedy = f"set {USER}=NAME:PASSWORD, or {TOKEN}, of a user who may write to {subject}"
            raise Failure(f"the registry {self.url} refuses the login: {status}", remedy, code="registry-login-refused")
        reason = _line(str(answer.get("message") or "without a reason"))
        if status >= FROM_SERVER:
            raise self._unavailable(f"{status} {reason}")
        if ("id" if response.ok else "error_code") not in answer:
            remedy = "name the URL before /subjects: http://HOST:8081, or http://HOST:8080/apis/ccompat/v7 of Apicurio"
            raise Failure(f"{self.url} answers {status} as no schema registry does", remedy, code="registry-foreign")
        return "" if response.ok else reason

    def _unavailable(self, reason: str) -> Failure:
        problem = f"the registry {self.url} is unavailable: {reason}"
        return Failure(problem, "start it, or correct its URL", code="registry-unavailable")


def subjects(known: Catalog) -> dict[str, str]:
    """The schemas of all published events by their subjects. Examples are left out: to edit one changes no contract."""
    return {
        f"{aggregate.topic}-{schema.name}": json.dumps(
            {**{name: rule for name, rule in schema.document.items() if name != "examples"}, "title": schema.name}
        )
        for aggregate in known.aggregates.values()
        if aggregate.published
        for schema in aggregate.schemas
    }


def _answer(response: requests.Response) -> Mapping[str, Any]:
    """The JSON object of a response; empty if it has no such content."""
    try:
        content = response.json()
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _line(text: str) -> str:
    return shortened(" ".join(text.split()))


def _cause(error: BaseException) -> str:
    """The innermost error that requests and urllib3 have wrapped, in its words."""
    inner = getattr(error, "reason", None) or next((one for one in error.args if isinstance(one, Exception)), None)
    return _cause(inner) if isinstance(inner, Exception) else _line(str(error))
