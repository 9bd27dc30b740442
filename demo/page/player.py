"""The walkthrough on the terminal and on the page: the same story, seen twice."""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg2
from outbox import Failure
from outbox_lab.walkthrough import Player, Story

from demo.page.actions import ACTIONS, Action, Hands
from demo.page.app import Desk, Server, create_app
from demo.page.hub import Hub
from demo.page.lesson import WAIT_S, Lesson, PageScreen
from demo.page.poller import Poller
from demo.page.probe import Probe, is_uuid, not_readable, now_ms, outbox_row
from demo.page.readings import Readings
from demo.page.security import Guard
from demo.page.state import NO_CAUSE, State

LOGS = {"samples": 600, "marks": 60, "lines": 200, "said": 30}
TABLES = {"events": 120}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LOG = logging.getLogger(__name__)


class PagePlayer(Player, Desk):
    """Plays the story on the terminal and on a page of this host, then does what the page asks for.

    Everything that changes the chain happens on the thread that calls `play` and `wait`: one thing at a time.
    """

    def __init__(self) -> None:
        self.hub = Hub(LOGS, TABLES)
        self.screen = self._terminal = PageScreen(self.hub)
        self._lesson = Lesson(self.hub, self._mark, self._played)
        self._poller = Poller(self._read, self.hub)
        self.asked_for: queue.Queue[Callable[[], None]] = queue.Queue(maxsize=1)
        self._freedom = threading.Lock()  # of what follows, and of the page's word on it
        self.is_free = False
        self._is_started = False  # whether the chain is
        self._probe: Probe | None = None
        self.server: Server | None = None

    # The player -------------------------------------------------------------------------------------------------------

    def play(self, story: Story) -> None:
        """Serve the page, and play the story as the terminal's player does; the page may pause it."""
        self._story = story
        self._hands = Hands(story.chain, story.workload.right, story.workload.naive)
        self._serve()
        self._show_stage("the lesson is played")
        self._lesson.play(story, self.screen, paused=False)
        self._poller.when_settled(_forget_cause)

    def wait(self) -> None:
        """Do what the page asks for, until Ctrl-C."""
        self.finish()
        while True:
            try:
                asked = self.asked_for.get(timeout=WAIT_S)
            except queue.Empty:
                continue
            try:
                asked()
            finally:
                self.finish()

    def close(self) -> None:
        """Stop the page."""
        has_ended = self._poller.stop()
        if self.server is not None:
            self.hub.close()
            self.server.stop()
        if self._probe is not None and has_ended:  # else its connections are in use, and end with this process
            self._probe.close()

    # The desk: asked by the threads of the server ---------------------------------------------------------------------

    def act(self, name: str) -> bool:
        """Begin an action."""
        action = ACTIONS[name]
        return action.lacks(self._hands) is None and self.ask(action.label, lambda: self._do(action))

    def lesson(self, verb: str) -> bool:
        """Play, pause, resume or step the lesson."""
        if verb == "play":
            return self.ask("the lesson is played", self._play_again)
        return {"pause": self._lesson.pause, "resume": self._lesson.resume, "step": self._lesson.step}[verb]()

    def look_up(self, event_id: str) -> dict[str, Any] | None:
        """The outbox row and the records of an event."""
        journey = self._poller.state.journeys.get(event_id)
        row = None
        if self._is_started and is_uuid(event_id):
            try:
                row = outbox_row(self._story.chain.settings, event_id)
            except Failure as failure:
                row = json.dumps({"unavailable": failure.message})
            except psycopg2.Error:
                row = json.dumps({"unavailable": "the database does not answer"})
        if journey is None and row is None:
            return None
        records = [
            {
                "topic": one.topic,
                "partition": one.partition,
                "offset": one.offset,
                "key": one.key,
                "headers": dict(one.headers),
                "value": one.value,
            }
            for one in (journey.records if journey else [])
        ]
        return {"row": json.loads(row) if row else None, "records": records}

    # ------------------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        server = self.server = _listening(*self.page)
        guard = Guard()
        server.start(create_app(self.hub, self, guard))
        self._poller.start()
        note = "" if self.page[0] in LOOPBACK else " (`docker compose run --service-ports` publishes it)"
        self._terminal.address(f"http://127.0.0.1:{server.port}/#token={guard.token}", note)

    def ask(self, label: str, do: Callable[[], None]) -> bool:
        with self._freedom:
            if not self.is_free:
                return False
            self.is_free = False
            self._show_stage(label)
            self.asked_for.put_nowait(do)
        return True

    def _do(self, action: Action) -> None:
        """Do an action, say what happened, and say when everything agrees again."""
        began = time.monotonic()
        self._poller.forget_settled()
        if action.group != "traffic":
            self._mark("fault", action.label)
        try:
            said = action.do(self._hands, self._report)
        except Exception as error:
            self._say("failed", action.label, _reason(error))
            self._poller.when_settled(_forget_cause)  # it may have done a part of it
            return
        if self._probe is not None:
            self._probe.ask_mode_again()
        self._say("done", action.label, said)
        self._poller.when_settled(lambda state: self._settled(action.label, state, time.monotonic() - began))

    def _settled(self, label: str, state: State, after_s: float) -> None:
        _forget_cause(state)
        when = "" if self._poller.has_gap else f", {after_s:.1f} s after it began"
        drifts = [
            f"{name} {'agrees with the ledger' if not one['drift'] else 'is off by ' + format(one['drift'], ',')}"
            for name, one in state.summary.items()
        ]
        self._say("settled", label, f"Nothing is in flight any more{when}: {'; '.join(drifts)}.")

    def _play_again(self) -> None:
        """Another story on the same chain. Its failures are shown, and do not change this command's exit status."""
        screen = PageScreen(self.hub)
        story = Story(self._story.chain, self._story.workload, screen)
        has_failed = False
        self._poller.forget_settled()
        try:
            self._lesson.play(story, screen, paused=True)
        except Exception as error:
            screen.say(f"The lesson ended: {_reason(error)}")
            has_failed = True
        finally:
            story.stop()
        self._poller.when_settled(_forget_cause)
        if has_failed:
            self._repair(screen)

    def _repair(self, screen: PageScreen) -> None:
        """Start the parts that a step of the lesson has left dead."""
        try:
            self._story.chain.start(self._report)
        except Exception as error:
            screen.say(f"The chain cannot be repaired: {_reason(error)}")

    def _played(self, step: int) -> None:
        self._is_started = self._is_started or step == 0

    def _read(self) -> Readings | None:
        if not self._is_started:
            return None
        try:
            self._probe = self._probe or Probe(self._story.chain)
        except Failure as failure:
            return not_readable(failure.message)
        return self._probe.read()

    def finish(self) -> None:
        with self._freedom:
            self.is_free = True
            self._show_stage(None)

    def _report(self, text: str) -> None:
        self.screen.progress(text)
        self._show_stage(text)

    def _mark(self, kind: str, text: str) -> None:
        self._poller.state.cause = text
        self.hub.publish(logs={"marks": [{"at_ms": now_ms(), "kind": kind, "text": text}]})

    def _say(self, kind: str, label: str, text: str) -> None:
        self.hub.publish(logs={"said": [{"at_ms": now_ms(), "kind": kind, "label": label, "text": text}]})

    def _show_stage(self, busy: str | None) -> None:
        actions = [
            {"name": name, "label": one.label, "hint": one.hint, "group": one.group, "lacks": one.lacks(self._hands)}
            for name, one in ACTIONS.items()
        ]
        self.hub.publish({"stage": {"busy": busy, "actions": actions}})


def _forget_cause(state: State) -> None:
    """Forget the last action: it has no effect any more."""
    state.cause = NO_CAUSE


def _reason(error: Exception) -> str:
    """Why something failed, in one line. The traceback of an unexpected error goes to the terminal."""
    if isinstance(error, (Failure, TimeoutError)):
        return next(iter(str(error).splitlines()), "it took too long")
    LOG.error("unexpected error", exc_info=error)
    return f"unexpected {type(error).__name__}; the terminal has more"


def _listening(host: str, port: int) -> Server:
    """A server on this port; on a free one if it is taken."""
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            attempt.bind((host, port))
        except OSError:
            port = 0
    return Server(host, port)
