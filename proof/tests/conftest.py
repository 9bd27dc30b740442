"""Tests of the proofs: their documents say what was measured, and a part of each is measured again."""

from __future__ import annotations

pytest_plugins = ["outbox_lab.testing.plugin"]
