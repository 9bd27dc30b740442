"""A new version of an event is rolled out under load: the service's processes and the sinks' are of two releases.

The project is the newer release. A fault goes back to the older one, service first, and then rolls out again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psycopg2

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import SinkRole
from outbox.events import catalog
from outbox.kafka import records, topics
from outbox.sink.decoding.decoder import UNKNOWN_VERSION
from outbox.sink.spec import SinkSpec
from outbox_lab.soak import releases
from outbox_lab.soak.fault import Fault, Make, NotFired, wait_or_not_fired
from outbox_lab.soak.faults import commands
from outbox_lab.soak.faults.records import Place, has_passed
from outbox_lab.soak.releases import OlderRelease
from outbox_lab.soak.testbed import Testbed

STEP_TIMEOUT_S = 300.0
OPEN = "SELECT DISTINCT sink FROM public.dead_letters WHERE sink = ANY(%s) AND reason = %s AND status = 'open'"


class Rollout(Fault):
    """A rollout in one of two orders."""

    parts = ("service", "sinks")
    needs = ("postgres", "kafka", "cluster")

    def __init__(self, first: str) -> None:
        self.name = f"rollout-{first}-first"
        self._first = first
        self._is_service_first = first == "service"

    @property
    def summary(self) -> str:
        """What it does."""
        late = "sinks set it aside at first" if self._is_service_first else "then the service writes it"
        return f"A new version of an event is rolled out, {self._first} first: {late}."

    def is_possible(self, testbed: Testbed) -> bool:
        return testbed.older is not None and bool(_asking(testbed, testbed.older))

    def fire(self, testbed: Testbed, _: random.Random) -> str:
        if testbed.older is None:
            raise NotFired("the domain has no older release")
        one = _Rollout(testbed, testbed.older)
        one.deploy_service(is_older=True)
        one.wait_applied(is_older=True)
        one.deploy_sinks(is_older=True)
        one.wait_applied(is_older=True)
        if self._is_service_first:
            one.deploy_service(is_older=False)
            one.wait_set_aside()
            one.deploy_sinks(is_older=False)
            one.replay()
        else:
            one.deploy_sinks(is_older=False)
            one.wait_applied(is_older=True)
            if one.waiting():
                raise NotFired(f"{', '.join(one.waiting())} set events of {one.older.event} aside")
            one.deploy_service(is_older=False)
        one.wait_applied(is_older=False)
        return one.evidence()

    def heal(self, testbed: Testbed) -> None:
        """Let all work for the newer release, and replay what sinks of the older one have set aside."""
        if testbed.older is None:
            return
        one = _Rollout(testbed, testbed.older)
        if testbed.service.release is not None:
            one.deploy_service(is_older=False)
        if any(process.release is not None for process in testbed.sinks):
            one.deploy_sinks(is_older=False)
        for process in testbed.sinks:
            process.wait_ready()
        one.replay()


class _Rollout:
    """One rollout, and what has come of it."""

    def __init__(self, testbed: Testbed, older: OlderRelease) -> None:
        self._testbed, self.older = testbed, older
        self._type = older.event.partition(".")[2].encode()
        self._topic, self._specs = _topic(testbed, older), _asking(testbed, older)
        self._sinks = [one.name for one in self._specs]
        self._began = topics.high_watermarks(testbed.settings, self._topic)
        self._folder = testbed.settings.home / "older-release"

    def deploy_service(self, *, is_older: bool) -> None:
        """Restart the service for a release. What it writes from then on is of that release."""
        service = self._testbed.service
        service.stop()
        service.release = self._release(is_older=is_older)
        service.start()

    def deploy_sinks(self, *, is_older: bool) -> None:
        """Restart all sinks for a release. What they read next shows that they are ready."""
        for process in self._testbed.sinks:
            process.stop()
            process.release = self._release(is_older=is_older)
            process.spawn()

    def wait_applied(self, *, is_older: bool) -> None:
        """Wait until an event of a release is written from now on, and the sinks have read it and all before it."""
        since = topics.high_watermarks(self._testbed.settings, self._topic)
        version = "the version before" if is_older else f"version {self.older.version}"

        def applied() -> bool:
            found = self._found(since)
            return bool(found[is_older]) and self._have_read([*found[True], *found[False]])

        self._wait(f"{', '.join(self._sinks)} to read {self.older.event} in {version}", applied)

    def wait_set_aside(self) -> None:
        """Wait until each sink has set an event of the newer version aside."""
        what = f"{', '.join(self._sinks)} to set {self.older.event} aside"
        self._wait(what, lambda: self.waiting() == set(self._sinks))

    def waiting(self) -> set[str]:
        """The sinks with an open letter of a version that they did not know."""
        rows = self._testbed.query(OPEN, [self._sinks, UNKNOWN_VERSION], SinkRole.AUDITOR)
        return {sink for (sink,) in rows}

    def replay(self) -> None:
        """Replay these letters until none is left."""

        def replayed() -> bool:
            if self.waiting():
                words = ("dead-letters", "replay", "--reason", UNKNOWN_VERSION)
                commands.run(self._testbed, *words, expected=commands.Replay.expected)
            return not self.waiting() and self._have_read(self._found(self._began)[False])

        self._wait("events in the newer version to be replayed", replayed)

    def evidence(self) -> str:
        """How many events there are of each version since it began."""
        found = self._found(self._began)
        return (
            f"{self.older.event}: {len(found[True])} in the version before and {len(found[False])} in version "
            f"{self.older.version}, read by {', '.join(self._sinks)}"
        )

    def _release(self, *, is_older: bool) -> Path | None:
        if not is_older:
            return None
        if not self._folder.is_dir():
            releases.make(project.current().root, self._folder, self.older)
        return self._folder

    def _found(self, since: Mapping[int, int]) -> Mapping[bool, list[Place]]:
        """The places of the event since these offsets: of the older release, and of the newer one."""
        ends = topics.last_stable_offsets(self._testbed.settings, self._topic)
        within = {partition: (first, ends[partition]) for partition, first in since.items()}
        found: dict[bool, list[Place]] = {True: [], False: []}
        for message in records.read(self._testbed.settings, self._topic, within):
            headers = dict(message.headers() or [])
            if headers.get("eventType") == self._type:
                is_older = headers.get("schemaVersion") != str(self.older.version).encode()
                found[is_older].append((message.partition() or 0, message.offset() or 0))
        return found

    def _have_read(self, places: Sequence[Place]) -> bool:
        return has_passed(self._testbed, self._specs, self._topic, places)

    @staticmethod
    def _wait(what: str, is_so: Callable[[], bool]) -> None:
        def look() -> bool:
            with suppress(Failure, psycopg2.Error):  # a link may be broken
                return is_so()
            return False

        wait_or_not_fired(what, look, timeout_s=STEP_TIMEOUT_S, poll_s=1)


def _topic(testbed: Testbed, older: OlderRelease) -> str:
    return catalog.of_project(testbed.settings).aggregates[older.event.partition(".")[0]].topic


def _asking(testbed: Testbed, older: OlderRelease) -> list[SinkSpec]:
    """The sinks that ask for the event."""
    topic = _topic(testbed, older)
    return [one for one in testbed.readers(topic) if older.event in one.decoders[topic].wanted_names]


FAULTS: list[Make] = [partial(Rollout, "sinks"), partial(Rollout, "service")]
