"""Unpacking keeps what a server needs, and stays inside its folder."""

from __future__ import annotations

import io
import stat
import tarfile  # noqa: TID251
from collections.abc import Callable
from pathlib import Path

import pytest

from outbox_lab.testing.archive import unpack

type_of = {"link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE, "folder": tarfile.DIRTYPE, "pipe": tarfile.FIFOTYPE}
Pack = Callable[..., Path]


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    """Make an archive of (name, what it is or links to) pairs."""

    def make(*members: tuple[str, str, str]) -> Path:
        with tarfile.open(tmp_path / "packed.txz", "w:xz") as packed:
            for kind, name, content in members:
                member = tarfile.TarInfo(name)
                member.mode = 0o6777
                if kind == "file":
                    member.size = len(content)
                    packed.addfile(member, io.BytesIO(content.encode()))
                else:
                    member.type, member.linkname = type_of[kind], content
                    packed.addfile(member)
        return tmp_path / "packed.txz"

    return make


def test_files_folders_and_links_are_unpacked(pack: Pack, tmp_path: Path) -> None:
    archive = pack(("folder", "lib", ""), ("file", "lib/a.5", "text"), ("link", "lib/a", "a.5"), ("file", "bin/x", "x"))
    unpack(archive, tmp_path / "out")
    assert (tmp_path / "out" / "lib" / "a").read_text() == "text"
    assert (tmp_path / "out" / "lib" / "a").is_symlink()
    assert stat.S_IMODE((tmp_path / "out" / "bin" / "x").stat().st_mode) == 0o755  # writable by its owner only


@pytest.mark.parametrize(
    "members",
    [
        [("file", "../stolen", "x")],
        [("file", "/tmp/outside/stolen", "x")],  # noqa: S108
        [("link", "out", "../.."), ("file", "out/stolen", "x")],
        [("link", "out", "/etc")],
        [("link", "a", "b/.."), ("link", "b", "."), ("link", "c", "a/../..")],
        [("hard link", "stolen", "../../etc/passwd")],
        [("hard link", "stolen", "inside")],
        [("pipe", "pipe", "")],
    ],
)
def test_what_leaves_the_folder_or_is_special_is_refused(
    pack: Pack, tmp_path: Path, members: list[tuple[str, str, str]]
) -> None:
    before = set(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"outside of|is no file"):
        unpack(pack(*members), tmp_path / "out")
    assert {path.name for path in set(tmp_path.iterdir()) - before} <= {"packed.txz", "out"}
