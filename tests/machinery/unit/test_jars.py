"""The sets of JVM parts: what is optional is not downloaded with the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outbox.jvm import jars
from tests.support.failures import raises


def test_every_configuration_is_in_one_set_and_the_optional_one_by_itself() -> None:
    declared = re.findall(r'<conf name="(\w+)"', jars.IVY_FILE.read_text())
    assert sorted(name for together in jars.SETS for name in together) == sorted(declared)
    assert ("lakehouse",) in jars.SETS


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(jars, "_cache", lambda: tmp_path / "file" / "jars")
    with raises("jars-not-writable", str(tmp_path)):
        jars.resolve("lakehouse")
