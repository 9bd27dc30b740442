"""Unpacking a tar archive safely on every Python that we support: the filters of tarfile came with 3.11.4."""

from __future__ import annotations

import shutil
import tarfile  # noqa: TID251
from pathlib import Path


def unpack(archive: Path, folder: Path) -> None:
    """Unpack files, folders and symbolic links. Owners and special permissions are left out.

    Raises ValueError at a member that is anything else, or that is or points outside of ``folder``.
    """
    root = folder.resolve()
    with tarfile.open(archive) as packed:
        for member in packed:
            path = root / member.name
            if not _is_inside(root, path) or not _is_inside(root, path.parent / member.linkname):
                raise ValueError(f"{member.name} is outside of the archive's folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.isdir():
                path.mkdir(exist_ok=True)
            elif member.issym():
                path.symlink_to(member.linkname)
            elif member.isfile() and (content := packed.extractfile(member)):
                with content, path.open("xb") as file:
                    shutil.copyfileobj(content, file)
                path.chmod(member.mode & 0o755)
            else:
                raise ValueError(f"{member.name} is no file, folder or symbolic link")


def _is_inside(root: Path, path: Path) -> bool:
    return path.resolve().is_relative_to(root)
