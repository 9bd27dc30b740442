"""Fixtures of rehearsals. Each test breaks a chain of its own."""

from __future__ import annotations

import pytest

from outbox.base.settings import Settings
from tests.stock import Client
from tests.support.rehearsal import Rehearsal, Rehearse


@pytest.fixture
def rehearsal(chain: Settings, client: Client) -> Rehearse:
    """The rehearsal of an entry, by its title, on a chain whose connector relays."""
    return lambda title: Rehearsal(chain, client, title)
