"""A Debezium connector on Kafka Connect: apply it, say how it is, remove it; the outbox's, unless told which.

Applying is idempotent and checks first what Debezium would not (`outbox.relay.slot`): that the publication is there,
and that the replication slot is the one that the stored offset belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import requests

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import WaitTimeoutError, wait_for
from outbox.kafka import topics
from outbox.relay import connectors, offsets, slot
from outbox.relay.connectors import Config, Connector

REQUEST_TIMEOUT_S = 30.0
REBALANCE_TIMEOUT_S = 60.0
START_TIMEOUT_S = 60.0

# Connect's words; a test would notice others.
NOT_ENABLED = "does not have exactly-once source support enabled"
REBALANCING = "because a rebalance is expected"
EXISTS = "already exists"


@dataclass(frozen=True)
class Status:
    """What Connect says of the connector, and the exactly-once mode really in force."""

    connector: str  # RUNNING, PAUSED, STOPPED, FAILED, UNASSIGNED, or MISSING
    tasks: list[str] = field(default_factory=list)
    error: str | None = None  # first line of the trace of what failed
    worker_exactly_once: bool | None = None  # None: the worker was not asked, or did not say
    connector_exactly_once: str | None = None  # required or requested
    transaction_boundary: str | None = None

    @property
    def is_running(self) -> bool:
        """The connector and its task run."""
        return self.connector == "RUNNING" and self.tasks == ["RUNNING"]

    @property
    def mode(self) -> str:
        """The delivery in force between Debezium and Kafka."""
        if self.connector == "MISSING":
            return "none"
        match self.worker_exactly_once:
            case None:
                return "unknown"
            case True:
                return f"exactly-once (transaction boundary {self.transaction_boundary})"
        return "at-least-once"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "mode": self.mode}


def apply(settings: Settings, connector: Connector | None = None) -> str:
    """Make the connector run as its file says, and return what was done: created, updated, restarted or unchanged.

    Makes the topics first; for a captured table its publication too. Raises Failure if the publication is missing, the
    slot cannot be trusted, Connect refuses the configuration, or the task fails (with the first line of its trace).
    """
    connector = connector or connectors.load(settings)
    rest = Rest(settings, connector)
    if not connector.is_outbox:
        slot.publish(settings, connector)
    slot.require_publication(settings, connector)
    topics.create(settings, connector)
    wanted, current = connector.config, rest.config()
    if current is None:
        # Connect keeps the offsets of a connector that was removed, and tells them only of one that is there.
        current = rest.create_stopped(wanted)
    slot.require_continuity(settings, rest.offset_lsn, connector)
    if current is None:
        done = "created"
    elif current != {**wanted, "name": connector.name}:
        rest.stop()  # else Connect tells the state of the old task for a while
        try:
            rest.put_config(wanted)
        except Failure:
            rest.resume()  # refused: it goes on as it was
            raise
        done = "updated"
    elif rest.status().error:
        rest.stop()
        done = "restarted"
    else:
        done = "unchanged"
    rest.resume()
    _wait_running(connector, rest)
    return done


def status(settings: Settings, connector: Connector | None = None) -> Status:
    """How the connector is. Raises Failure if Connect cannot be reached."""
    connector = connector or connectors.load(settings)
    rest = Rest(settings, connector)
    found = rest.status()
    config = rest.config() or {}
    return Status(
        connector=found.connector,
        tasks=found.tasks,
        error=found.error,
        worker_exactly_once=rest.worker_exactly_once(connector.config),
        connector_exactly_once=config.get("exactly.once.support"),
        transaction_boundary=config.get("transaction.boundary"),
    )


def relax(settings: Settings) -> None:
    """Let the connectors run on a worker without exactly-once: the first step of switching off, before the worker."""
    for kind in connectors.kinds():
        rest = Rest(settings, connectors.load(settings, kind))
        current = rest.config()
        if current is not None and current.get("exactly.once.support") != "requested":
            rest.put_config({**current, "exactly.once.support": "requested"})


def remove(settings: Settings, connector: Connector | None = None, *, forget: bool = False) -> bool:
    """Remove the connector; False if there was none.

    Its slot and offsets stay, so that ``apply`` goes on where it was; until then the slot holds the log back.
    ``forget`` removes them too, and what `apply` made in the database: the next ``apply`` starts with a snapshot of
    the whole table. Cut off anywhere, it can be run again.
    """
    connector = connector or connectors.load(settings)
    rest = Rest(settings, connector)
    existed = rest.config() is not None
    if existed:
        rest.delete()
    if forget:
        slot.drop(settings, connector)  # first, as it waits until the connector's task has let go of it
        offsets.forget(settings, connector)
        if not connector.is_outbox:
            slot.unpublish(settings, connector)
    return existed


class Rest:
    """Connect's REST interface, for one connector.

    While the group is rebalancing it is asked again until a deadline. Raises Failure for what Connect
    refuses and for a Connect out of reach.
    """

    def __init__(self, settings: Settings, connector: Connector | None = None) -> None:
        self._settings = settings
        self._url = settings.connect_url.rstrip("/")
        self._name = (connector or connectors.load(settings)).name
        self._session = requests.Session()
        if settings.connect_username is not None:
            self._session.auth = (settings.connect_username, settings.connect_password.get_secret_value())
        # Given with each request: a session's own would lose against REQUESTS_CA_BUNDLE in the environment.
        self._cafile = None if settings.connect_cafile is None else str(settings.connect_cafile)

    def config(self) -> Config | None:
        """The configuration in force, None if there is no such connector."""
        answer = self._call("GET", f"/connectors/{self._name}/config", missing_is_none=True)
        return None if answer is None else dict(answer)

    def create_stopped(self, config: Config) -> Config | None:
        """Create the connector without letting it run yet. If somebody else has done so meanwhile, what they made of
        it is returned, and left as it is.
        """
        body = {"name": self._name, "config": config, "initial_state": "STOPPED"}
        if self._call("POST", "/connectors", json=body, existing_is_none=True) is not None:
            return None
        return wait_for("the connector that another has created", self.config, timeout_s=START_TIMEOUT_S)

    def put_config(self, config: Config) -> None:
        """Replace the connector's configuration."""
        self._call("PUT", f"/connectors/{self._name}/config", json=config)

    def stop(self) -> None:
        """End its tasks, and wait until they have ended. Offsets stay."""
        self._call("PUT", f"/connectors/{self._name}/stop")
        wait_for("the connector to stop", lambda: self.status().tasks == [], timeout_s=START_TIMEOUT_S)

    def resume(self) -> None:
        """Go on if it was paused or stopped; else nothing happens."""
        self._call("PUT", f"/connectors/{self._name}/resume")

    def delete(self) -> None:
        """Stop the connector, remove it, and wait until it is gone."""
        self.stop()
        self._call("DELETE", f"/connectors/{self._name}", missing_is_none=True)
        wait_for("the connector to be gone", lambda: self.status().connector == "MISSING", timeout_s=START_TIMEOUT_S)

    def status(self) -> Status:
        """The states of connector and tasks."""
        answer = self._call("GET", f"/connectors/{self._name}/status", missing_is_none=True)
        if answer is None:
            return Status("MISSING")
        traces = [part.get("trace") for part in (answer["connector"], *answer["tasks"]) if part["state"] == "FAILED"]
        return Status(
            connector=answer["connector"]["state"],
            tasks=[task["state"] for task in answer["tasks"]],
            error=next((_first_line(trace) for trace in traces), None),
        )

    def offset_lsn(self) -> int | None:
        """The position in the log that the connector stored last; None if it has none yet.

        That is the last commit it has read, as a slot counts in commits too: when transactions overlap, an event
        (``lsn``) of the later one may stand before the commit (``lsn_commit``) of the one relayed before it.
        """
        return _position(self._offset())

    def streamed_lsn(self) -> int | None:
        """The same; None as long as the last one stored is of a snapshot, in which all rows share one position."""
        offset = self._offset()
        return None if offset.get("snapshot") else _position(offset)

    def _offset(self) -> dict[str, Any]:
        """The offset stored last; empty if there is none. A connector of one database has one."""
        answer = self._call("GET", f"/connectors/{self._name}/offsets", missing_is_none=True) or {"offsets": []}
        return next((dict(entry["offset"]) for entry in answer["offsets"] if entry["offset"]), {})

    def worker_exactly_once(self, config: Config) -> bool:
        """Whether the worker has exactly-once enabled. It does not say so; but it validates a wish for it."""
        wish = {**config, "name": self._name, "exactly.once.support": "required"}
        plugin = config["connector.class"].rpartition(".")[2]
        answer = self._call("PUT", f"/connector-plugins/{plugin}/config/validate", json=wish)
        errors = [
            e for entry in answer["configs"] if "once" in entry["value"]["name"] for e in entry["value"]["errors"]
        ]
        return not any(NOT_ENABLED in error for error in errors)

    def _call(
        self, method: str, path: str, *, json: Any = None, missing_is_none: bool = False, existing_is_none: bool = False
    ) -> Any:
        def answer() -> tuple[requests.Response] | None:  # a tuple, as a response that is an error counts as false
            response = self._session.request(
                method, self._url + path, json=json, timeout=REQUEST_TIMEOUT_S, verify=self._cafile
            )
            return None if is_rebalancing(response) else (response,)

        try:
            answered = wait_for(
                f"Connect to finish rebalancing (for {method} {path.partition('?')[0]})",
                answer,
                timeout_s=REBALANCE_TIMEOUT_S,
                poll_s=0.25,
            )
        except requests.RequestException as error:
            raise _unreachable(self._settings, error) from error
        response = answered[0]
        if response.status_code in (requests.codes.unauthorized, requests.codes.forbidden):
            raise Failure(
                f"Connect at {self._url} refuses the login: {response.status_code} to {method} {path}",
                "correct OUTBOX_CONNECT_USERNAME and OUTBOX_CONNECT_PASSWORD",
            )
        if missing_is_none and response.status_code == requests.codes.not_found:
            return None
        if existing_is_none and already_exists(response):
            return None
        if not response.ok:
            raise Failure(f"Connect answered {response.status_code} to {method} {path}: {_message(response)}")
        try:
            return response.json() if response.content else {}
        except ValueError:
            raise Failure(f"what answers at {self._url} is not Kafka Connect", "correct OUTBOX_CONNECT_URL") from None


def _position(offset: Mapping[str, Any]) -> int | None:
    return max(int(offset.get("lsn_commit") or 0), int(offset.get("lsn") or 0)) or None


def is_rebalancing(response: requests.Response) -> bool:
    """Whether Connect answers that its group is rebalancing: 409 as a rule, 500 to some questions. Ask again later."""
    if response.status_code == requests.codes.server_error:
        return REBALANCING in response.text
    return response.status_code == requests.codes.conflict and not already_exists(response)


def already_exists(response: requests.Response) -> bool:
    """Whether Connect refuses to create a connector that is there."""
    return response.status_code == requests.codes.conflict and EXISTS in _message(response)


def _unreachable(settings: Settings, error: requests.RequestException) -> Failure:
    """What keeps us from talking to Connect, and the settings to correct."""
    reason, remedy = _reason(error), "start it, or correct OUTBOX_CONNECT_URL"
    if isinstance(error, requests.exceptions.SSLError):
        remedy = "correct OUTBOX_CONNECT_CAFILE, or OUTBOX_CONNECT_URL: https, and a host that the certificate names"
    elif "refused" in reason and settings.is_embedded("connect_url"):
        remedy = "`outbox up` starts the embedded one"
    elif settings.connect_url.startswith("http:") and "refused" not in reason:
        remedy = "correct OUTBOX_CONNECT_URL: this is what a server of https does that is asked for http"
    return Failure(f"Connect at {settings.connect_url} is out of reach: {reason}", remedy)


def _reason(error: BaseException) -> str:
    """What is at the bottom of an error that requests and urllib3 have wrapped, in their words."""
    inner = getattr(error, "reason", None) or next((each for each in error.args if isinstance(each, Exception)), None)
    if isinstance(inner, Exception):
        return _reason(inner)
    return str(error) if str(error).isprintable() else "its answer is not HTTP"


def _wait_running(connector: Connector, rest: Rest) -> None:
    def running_or_failed() -> Status | None:
        found = rest.status()
        return found if found.is_running or found.error else None

    try:
        found = wait_for("the connector's task to run", running_or_failed, timeout_s=START_TIMEOUT_S, poll_s=0.2)
    except WaitTimeoutError as error:
        raise Failure(str(error), f"`{connector.command('status')}`, and the worker's log") from None
    if found.error:
        raise Failure(
            f"connector {connector.name} failed: {found.error}",
            f"mend it, then `{connector.command('apply')}` restarts it",
        )


def _first_line(trace: str | None) -> str:
    """The first line of a trace and, as Connect wraps what happened in lines that do not say it, the last cause."""
    lines = (trace or "no trace").splitlines()
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    return f"{lines[0]} ({causes[-1]})" if causes else lines[0]


def _message(response: requests.Response) -> str:
    try:
        told = str(response.json().get("message", response.text))
    except ValueError:
        told = response.text[:500]
    return " ".join(told.split())
