"""The pytest plugin: fixtures on real Postgres, Kafka, Connect and Spark, for the project around the working directory.

    # tests/conftest.py
    pytest_plugins = ["outbox_lab.testing.plugin"]

The parts start when a test first asks for them, on free ports, in a folder of their own below the project's home. They
end with the session, however it ends.
"""

from __future__ import annotations

import hypothesis

from outbox.base import project

pytest_plugins = [
    "outbox_lab.testing.fixtures.stack",
    "outbox_lab.testing.fixtures.databases",
    "outbox_lab.testing.fixtures.chain",
    "outbox_lab.testing.fixtures.spark",
]

project.make_importable()  # before a test module imports the project's packages


def pytest_configure() -> None:
    """No deadline for Hypothesis: how long an example takes says how busy the machine is."""
    hypothesis.settings.register_profile("outbox", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("outbox")
