"""The locked jars are downloaded from a repository, and what is not as locked is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from outbox.base.errors import Failure
from outbox.jvm import jars
from outbox_lab.testing.failures import raises

CONTENT = b"a jar"


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one jar and no metadata."""
    jar = tmp_path / "repository" / "org" / "example" / "part" / "1.0" / "part-1.0.jar"
    jar.parent.mkdir(parents=True)
    jar.write_bytes(CONTENT)
    monkeypatch.setenv("OUTBOX_MAVEN_MIRROR", (tmp_path / "repository").as_uri())
    monkeypatch.setattr(jars, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(jars, "LOCK_FILE", tmp_path / "jars.lock")
    return jar


def write_lock(revision: str, content: bytes) -> None:
    digest = hashlib.sha256(content).hexdigest()
    jars.LOCK_FILE.write_text(f"# locked\nlakehouse org.example part {revision} {digest}\n")


def test_mirror_with_a_password_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    write_lock("1.0", CONTENT)
    monkeypatch.setenv("OUTBOX_MAVEN_MIRROR", "http://name:hush@127.0.0.1:1/maven")
    with pytest.raises(Failure, match="OUTBOX_MAVEN_MIRROR") as caught:
        jars.resolve("lakehouse")
    assert "hush" not in str(caught.value)


def test_a_locked_jar_is_downloaded_once(repository: Path) -> None:
    write_lock("1.0", CONTENT)
    [jar] = jars.jars("lakehouse")
    assert jar.read_bytes() == CONTENT
    repository.unlink()
    assert jars.jars("lakehouse") == [jar]


def test_a_changed_jar_is_refused_and_downloaded_again(repository: Path) -> None:
    write_lock("1.0", CONTENT)
    repository.write_bytes(b"another jar")
    with raises("jars-changed", "part-1.0.jar"):
        jars.resolve("lakehouse")
    repository.write_bytes(CONTENT)
    assert jars.jars("lakehouse")


def test_a_missing_jar_is_reported() -> None:
    write_lock("2.0", CONTENT)
    with raises("jars-not-downloaded", "part-2.0.jar"):
        jars.resolve("lakehouse")
