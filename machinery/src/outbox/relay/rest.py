"""Kafka Connect's REST interface, for one connector."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outbox.base.errors import Failure
from outbox.base.heavy import requests
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.relay import connectors
from outbox.relay.connectors import Config, Connector

REQUEST_TIMEOUT_S = 30.0
REPEAT_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0

# Connect's wording; tests fail if a new version changes it.
NOT_ENABLED = "does not have exactly-once source support enabled"
REPEATABLE = ("because a rebalance is expected", "the request can be safely retried")
EXISTS = "already exists"


@dataclass(frozen=True)
class State:
    """The states of a connector and its tasks."""

    connector: str  # RUNNING, PAUSED, STOPPED, FAILED, UNASSIGNED, or MISSING
    tasks: list[str] = field(default_factory=list)
    error: str | None = None  # first line of the stack trace of the first failed part, and its last cause

    @property
    def is_running(self) -> bool:
        return self.connector == "RUNNING" and self.tasks == ["RUNNING"]

    @property
    def is_unassigned(self) -> bool:
        """No worker runs the connector or its task: for a moment while the group rebalances, or for good.

        For good (Kafka 4.3.1): a worker is frozen for longer than its session, another one has its task meanwhile and
        leaves, and the first one gets its old assignment back. It does not start what it has run before.
        """
        return "UNASSIGNED" in (self.connector, *self.tasks)


class Offset(NamedTuple):
    """Where a connector continues to read the write-ahead log."""

    lsn: int
    committed_us: int | None  # when its last event was committed, in microseconds since 1970; None: in a snapshot


class Rest:
    """Connect's REST interface, for one connector; the outbox's by default.

    Requests that Connect asks to repeat are repeated for a bounded time. Raises Failure for a request that Connect
    refuses, and if Connect is unavailable.
    """

    def __init__(self, settings: Settings, connector: Connector | None = None) -> None:
        self._settings = settings
        self._url = settings.connect_url.rstrip("/")
        self._name = (connector or connectors.load(settings)).name
        self._session = requests.Session()
        self._session.auth = settings.connect_login
        # Passed with each request: REQUESTS_CA_BUNDLE in the environment would override the session's own.
        self._cafile = None if settings.connect_cafile is None else str(settings.connect_cafile)

    def config(self) -> Config | None:
        """The effective configuration; None if there is no such connector."""
        answer = self._call("GET", f"/connectors/{self._name}/config", none_for=requests.codes.not_found)
        return None if answer is None else dict(answer)

    def create_stopped(self, config: Config) -> Config | None:
        """Create the connector without starting it.

        If another client has created it meanwhile, its configuration is returned and left unchanged.
        """
        body = {"name": self._name, "config": config, "initial_state": "STOPPED"}
        if self._call("POST", "/connectors", json=body, none_for=requests.codes.conflict) is not None:
            return None
        return wait_for("the connector that another client created", self.config, timeout_s=START_TIMEOUT_S)

    def put_config(self, config: Config) -> None:
        self._call("PUT", f"/connectors/{self._name}/config", json=config)

    def stop(self) -> None:
        """Stop its tasks, and wait until they have ended. Offsets stay."""
        self._call("PUT", f"/connectors/{self._name}/stop")
        wait_for("the connector to stop", lambda: self.state().tasks == [], timeout_s=START_TIMEOUT_S)

    def resume(self) -> None:
        """Continue after a pause or stop; otherwise nothing happens."""
        self._call("PUT", f"/connectors/{self._name}/resume")

    def restart_task(self) -> None:
        """Restart its task where it stopped. A Debezium connector for Postgres has one.

        To restart the connector would write to the config topic, which fails for good, without asking to repeat it,
        once the broker has forgotten the worker's transactional id (Kafka 4.3.1).
        """
        self._call("POST", f"/connectors/{self._name}/tasks/0/restart")

    def delete(self) -> None:
        """Stop the connector, remove it, and wait until it is gone."""
        self.stop()
        self._call("DELETE", f"/connectors/{self._name}", none_for=requests.codes.not_found)
        wait_for("the connector to be gone", lambda: self.state().connector == "MISSING", timeout_s=START_TIMEOUT_S)

    def state(self) -> State:
        answer = self._call("GET", f"/connectors/{self._name}/status", none_for=requests.codes.not_found)
        if answer is None:
            return State("MISSING")
        traces = [part.get("trace") for part in (answer["connector"], *answer["tasks"]) if part["state"] == "FAILED"]
        return State(
            connector=answer["connector"]["state"],
            tasks=[task["state"] for task in answer["tasks"]],
            error=next((_summary(trace) for trace in traces), None),
        )

    def offset(self) -> Offset | None:
        """The offset that the connector stored last; None if it has stored none. A connector of one database has one.

        Its position is that of the last commit it has read, because a slot counts in commits too. When transactions
        overlap, an event (``lsn``) of the later one may precede the commit (``lsn_commit``) of the earlier one.
        """
        path = f"/connectors/{self._name}/offsets"
        answer = self._call("GET", path, none_for=requests.codes.not_found) or {"offsets": []}
        stored: dict[str, Any] = next((entry["offset"] for entry in answer["offsets"] if entry["offset"]), {})
        position = max(int(stored.get("lsn_commit") or 0), int(stored.get("lsn") or 0))
        committed_us = None if stored.get("snapshot") else stored.get("ts_usec")  # else the time of Connect's host
        return Offset(position, committed_us) if position else None

    def worker_exactly_once(self, config: Config) -> bool:
        """Whether the worker has exactly-once enabled. It has no question for that, but validates a config for it."""
        requested = {**config, "name": self._name, "exactly.once.support": "required"}
        plugin = config["connector.class"].rpartition(".")[2]
        answer = self._call("PUT", f"/connector-plugins/{plugin}/config/validate", json=requested)
        errors = [
            e for entry in answer["configs"] if "once" in entry["value"]["name"] for e in entry["value"]["errors"]
        ]
        return not any(NOT_ENABLED in error for error in errors)

    def _call(self, method: str, path: str, *, json: Any = None, none_for: int | None = None) -> Any:
        """The answer to a request, as JSON; None for an answer with the status ``none_for``."""

        def answer() -> tuple[requests.Response] | None:  # a tuple, because a response with an error status is false
            response = self._session.request(
                method, self._url + path, json=json, timeout=REQUEST_TIMEOUT_S, verify=self._cafile
            )
            return None if is_repeatable(response) else (response,)

        try:
            (response,) = wait_for(
                f"Connect to take {method} {path.partition('?')[0]}, which it asks to repeat,",
                answer,
                timeout_s=REPEAT_TIMEOUT_S,
                poll_s=0.1,
            )
        except requests.RequestException as error:
            raise _unavailable(self._settings, error) from error
        if response.status_code == none_for:
            return None
        if response.status_code in (requests.codes.unauthorized, requests.codes.forbidden):
            raise Failure(
                f"Connect at {self._url} refuses the login: {response.status_code} to {method} {path}",
                "correct OUTBOX_CONNECT_USERNAME and OUTBOX_CONNECT_PASSWORD",
                code="connect-login-refused",
            )
        if not response.ok:
            said = _message(response)
            raise Failure(f"Connect answered {response.status_code} to {method} {path}: {said}", code="connect-refused")
        try:
            return response.json() if response.content else {}
        except ValueError:
            raise Failure(
                f"the server at {self._url} is not Kafka Connect", "correct OUTBOX_CONNECT_URL", code="connect-foreign"
            ) from None


def is_repeatable(response: requests.Response) -> bool:
    """Whether Connect asks to repeat a request: its group is rebalancing, usually 409, 500 to some requests; or it
    could not write to its config topic, 500. Any other 409 says that a connector exists.

    The first such write fails after a week without one: the broker has forgotten the worker's transactional id.
    """
    if response.status_code == requests.codes.server_error:
        return any(words in response.text for words in REPEATABLE)
    return response.status_code == requests.codes.conflict and EXISTS not in _message(response)


def _unavailable(settings: Settings, error: requests.RequestException) -> Failure:
    reason, remedy = _cause(error), "start it, or correct OUTBOX_CONNECT_URL"
    if isinstance(error, requests.exceptions.SSLError):
        remedy = "correct OUTBOX_CONNECT_CAFILE, or OUTBOX_CONNECT_URL: https, and a host that the certificate names"
    elif isinstance(error, requests.exceptions.ReadTimeout):
        remedy = "repeat the command; the worker's log says what it is busy with"
    elif "refused" in reason and settings.is_embedded("connect_url"):
        remedy = "`outbox up` starts the embedded one"
    elif settings.connect_url.startswith("http:") and "refused" not in reason:
        remedy = "correct OUTBOX_CONNECT_URL: an https server answers http like this"
    return Failure(f"Connect at {settings.connect_url} is unavailable: {reason}", remedy, code="connect-unavailable")


def _cause(error: BaseException) -> str:
    """The innermost error that requests and urllib3 have wrapped, in their words."""
    inner = getattr(error, "reason", None) or next((each for each in error.args if isinstance(each, Exception)), None)
    if isinstance(inner, Exception):
        return _cause(inner)
    return str(error) if str(error).isprintable() else "its answer is not HTTP"


def _summary(trace: str | None) -> str:
    """The first line of a stack trace, and its last cause: Connect wraps the cause in lines that do not name it."""
    lines = (trace or "no trace").splitlines()
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    return f"{lines[0]} ({causes[-1]})" if causes else lines[0]


def _message(response: requests.Response) -> str:
    try:
        message = str(response.json().get("message", response.text))
    except ValueError:
        message = response.text[:500]
    return " ".join(message.split())
