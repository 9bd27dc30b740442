"""The pytest plugin: fixtures on real Postgres, Kafka, Connect and Spark, for the project around the working directory.

    # tests/conftest.py
    pytest_plugins = ["outbox_lab.testing.plugin"]

The parts start when a test first asks for them, on free ports, in a folder of their own below the project's home. They
end with the session, however it ends.
"""

from __future__ import annotations

import hypothesis
import pytest

from outbox.base import project
from outbox.base.settings import load

pytest_plugins = [
    "outbox_lab.testing.fixtures.stack",
    "outbox_lab.testing.fixtures.spark",
]

project.make_importable()  # before a test module imports the project's packages


def pytest_configure(config: pytest.Config) -> None:
    """No deadline for Hypothesis: how long an example takes says how busy the machine is."""
    config.addinivalue_line("markers", "each_sink: the test runs for each sink of the project")
    hypothesis.settings.register_profile("outbox", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("outbox")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Look up the sinks of the contract test when pytest collects it, and not when it is imported."""
    if metafunc.definition.get_closest_marker("each_sink"):
        from outbox.sink import discovery

        metafunc.parametrize("sink", [job.name for job in discovery.jobs(load(environment=False))])
