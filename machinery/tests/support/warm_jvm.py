"""A JVM of Spark that outlives the sinks that run in it. A sink that finds one starts with a third of the work.

`outbox sink` is a Python process and its JVM. Starting the JVM, and its first query, cost far more than the few events
of a test. Here the product's own session starts a JVM once per home folder, and another one for sinks whose target
needs jars. Each `outbox sink` is still a process of its own, and its PySpark connects to that JVM: PySpark does so
wherever the environment names a gateway.

Runs share the JVM: its heap, class path, log configuration and environment, and all that Spark keeps in static fields.
The environment has no setting but the home folder. Runs share nothing of Python: arguments, settings, signal handlers
and logs belong to one process. The Spark context and the Kafka clients of a run end with it. A run that does not end in
order takes the JVM with it, and the next run starts another.

A test of the process itself needs a JVM that belongs to the process: signals, SIGKILL, the heap's size, the start and
the end of the JVM. `sink_process` has both kinds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from outbox.base import log, project
from outbox.base.settings import DOTENV, FIELDS, Settings, load
from outbox.sink import discovery
from outbox_lab.stack.command import SinkProcess
from outbox_lab.stack.process import Process
from outbox_lab.testing.command import outbox
from tests.support.paths import ROOT

WITH_JARS = "--with-jars"


def importing_tests() -> dict[str, str]:
    """The variable that lets a process in another folder import the tests."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


class WarmJvm(Process):
    """The JVM of a home folder, and the Python process that started it. Each ends with the other."""

    start_timeout_s = 120.0

    def __init__(self, settings: Settings, *, with_jars: bool = False) -> None:
        """``with_jars`` are those of the targets of all sinks."""
        super().__init__("jvm-with-jars" if with_jars else "jvm", settings.home)
        self._with_jars = with_jars
        default = FIELDS["sink_driver_memory"].default
        assert settings.sink_driver_memory == default, "its heap is that of the default setting"
        self._gateway = self.folder / "gateway.json"

    def argv(self) -> Sequence[str | Path]:
        return [sys.executable, "-m", __name__, self._gateway, *([WITH_JARS] if self._with_jars else [])]

    def env(self) -> Mapping[str, str]:
        return {"OUTBOX_HOME": str(self.home), DOTENV: os.devnull, **importing_tests()}

    def prepare(self) -> None:
        self._gateway.unlink(missing_ok=True)

    def is_ready(self) -> bool:
        return self._gateway.exists()

    def gateway(self) -> dict[str, str]:
        """The variables that lead PySpark to this JVM."""
        variables: dict[str, str] = json.loads(self._gateway.read_text())
        return variables

    def run(self, settings: Settings, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `outbox` to its end, its Spark in this JVM. What the JVM logs meanwhile is added to its stderr."""
        self.start()
        begin = self.log_file.stat().st_size
        try:
            given = {**settings.as_env(), **self.gateway(), **variables}
            done = outbox(*arguments, home=settings.home, **given)
        except BaseException:
            self.kill()
            raise
        done.stderr += self.log_file.read_bytes()[begin:].decode(errors="replace")
        if not (done.returncode == 0 or (done.returncode == 1 and is_in_order(done.stderr))):
            self.kill()
        return done


class WarmSink(SinkProcess):
    """A sink in the background, its Spark in a warm JVM; maybe with a fault of `tests.support.faulty_sink`."""

    def __init__(self, settings: Settings, arguments: Sequence[str], fault: str = "") -> None:
        super().__init__(f"sink-{settings.topic_prefix}", settings, arguments)
        self._jvm, self._fault = WarmJvm(settings), fault

    def argv(self) -> Sequence[str | Path]:
        faulty = [sys.executable, "-m", "tests.support.faulty_sink", self._fault, *self._arguments]
        return faulty if self._fault else super().argv()

    def env(self) -> Mapping[str, str]:
        return {**super().env(), **self._jvm.gateway(), **importing_tests()}

    def prepare(self) -> None:
        self._jvm.start()

    def stop(self) -> None:
        super().stop()
        if not is_in_order(self.tail(1)):
            self._jvm.kill()


def is_in_order(log: str) -> bool:
    """Whether a run, by the end of its log, has stopped its Spark: it was asked to end, or has reported a failure."""
    return any(line.startswith("outbox: ") or '"event": "stopped"' in line for line in log.splitlines())


def serve(file: Path, *options: str) -> None:
    """Start a JVM as a sink does, write its gateway into a file, and wait for its end."""
    from pyspark import SparkContext

    from outbox.sink.spark.session import session

    project.make_importable()
    settings = load()
    log.configure(settings)
    session(settings, [one.target for one in discovery.sinks(settings).values()] if WITH_JARS in options else []).stop()
    gateway = SparkContext._gateway
    assert gateway is not None
    made = file.with_suffix(".new")
    made.touch(mode=0o600)
    variables = {
        "PYSPARK_GATEWAY_PORT": str(gateway.gateway_parameters.port),
        "PYSPARK_GATEWAY_SECRET": gateway.gateway_parameters.auth_token,
    }
    made.write_text(json.dumps(variables))
    made.rename(file)
    gateway.proc.wait()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), *sys.argv[2:])
