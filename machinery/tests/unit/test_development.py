"""What `outbox dev` sees of the files that it watches."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from outbox.stack.development import _states


@pytest.fixture
def watched(tmp_path: Path) -> Path:
    """A folder of watched files."""
    for name in ("a.py", "b.sql", "notes.txt", "within/c.py"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    return tmp_path


def at_first_stat_of(name: str, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch, *, before: bool) -> None:
    """Let something happen just before or just after a file is looked at for the first time."""
    stat, done = Path.stat, list[Path]()

    def with_act(path: Path, **options: bool) -> os.stat_result:
        is_first = path.name == name and not done
        if is_first:
            done.append(path)
            if before:
                act()
        try:
            return stat(path, **options)
        finally:
            if is_first and not before:
                act()

    monkeypatch.setattr(Path, "stat", with_act)


def test_source_files_are_watched_in_every_folder(watched: Path) -> None:
    assert {file.relative_to(watched).as_posix() for file in _states([watched])} == {"a.py", "b.sql", "within/c.py"}
    before = _states([watched])
    os.utime(watched / "a.py", ns=(1, 1))
    changed = {file.name for file, time in _states([watched]).items() if before[file] != time}
    assert changed == {"a.py"}


@pytest.mark.parametrize("before", [True, False])
def test_a_file_may_be_removed_meanwhile(watched: Path, monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    at_first_stat_of("a.py", (watched / "a.py").unlink, monkeypatch, before=before)
    assert watched / "b.sql" in _states([watched])
    assert watched / "a.py" not in _states([watched])


def test_a_folder_may_be_removed_meanwhile(watched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_first_stat_of("a.py", lambda: shutil.rmtree(watched / "within"), monkeypatch, before=False)
    assert {file.name for file in _states([watched])} <= {"a.py", "b.sql", "c.py"}
    assert {file.name for file in _states([watched])} == {"a.py", "b.sql"}
