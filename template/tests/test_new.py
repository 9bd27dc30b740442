"""`outbox new` in projects of each sample: what it writes passes `make check`, and its sinks keep the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from template.tests import bake, pages, test_guide
from template.tests.test_guide import DOMAIN, GUIDE, TIMEOUT_S, copy, generated, run

pytestmark = [pytest.mark.copies, pytest.mark.timeout(TIMEOUT_S)]
home = test_guide.home

# Two of each, and a sink of events that the sample has.
COMMANDS = """
outbox new aggregate appointment --events booked,moved --property starts_at:timestamp --property vet:text
outbox new aggregate invoice --key number:text --events issued --property cents:integer --optional note:text:personal
outbox new event appointment.cancelled --property reason:text
outbox new event invoice.paid --property cents:integer
outbox new version appointment.booked --property room:text=unassigned
outbox new version invoice.issued --property channel:text --remove note
outbox new sink appointments --events appointment
outbox new sink invoiced --events invoice --total cents
outbox new sink activity --events appointment,invoice --history
outbox new sink paid-days --events invoice.paid --transform
outbox new sink lake --events appointment --lakehouse
outbox new sink lake-days --events invoice --lakehouse --transform
outbox new sink sample-states --events {aggregate}
outbox new sink sample-days --events {aggregate} --history
"""
OF_SAMPLE = {"minimal": "depot", "ledger": "account", "shop": "order"}
ON_POSTGRES = "appointments or invoiced or sample"


@pytest.mark.parametrize("sample", OF_SAMPLE)
def test_two_of_each_pass_the_check_of_a_project(home: Path, sample: str) -> None:
    project = of_sample(home, sample)
    run(project, "export PATH=$PWD/.venv/bin:$PATH" + COMMANDS.format(aggregate=OF_SAMPLE[sample]))
    run(project, "make -o .venv/dev check")
    if sample == "minimal":
        run(project, f"make -o .venv/dev -o archives test ARGS='-n 0 -q tests/integration -k \"{ON_POSTGRES}\"'")
    edited = bake.git(project, "diff", "--name-only", "HEAD").split()
    assert edited == ["pyproject.toml", "service/payloads.py"]


def of_sample(folder: Path, sample: str) -> Path:
    """A committed project."""
    project = generated(folder, "ledger" if sample == "ledger" else "minimal")
    if sample == "shop":
        run(project, pages.block(GUIDE.text, "rm -r"))
        for name in DOMAIN:
            copy(GUIDE.example / name, project / name)
        bake.commit(project)
    return project
