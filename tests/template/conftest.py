"""Tests of this repository: its files agree with each other. They start no server."""

from __future__ import annotations

from tests.support import suite
from tests.support.paths import ROOT

suite.choose(ROOT)
