"""Instructions of the Dockerfile, by stage."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from template.tests.paths import ROOT

FILE = ROOT / "Dockerfile"
FILES = "files"  # the stage with our files, readable by everybody
MACHINERY = "machinery"  # the second build context
# In that stage, and where the folders are in the repository.
PLACES = {"/files/project": ROOT, "/files/machinery": ROOT / "machinery" / "src"}


@dataclass(frozen=True)
class Stage:
    name: str
    base: str
    instructions: tuple[str, ...]

    def copies(self, source: str | None = None) -> Iterator[tuple[list[str], str]]:
        """Sources and destination of each COPY: of the build context, or from another one or a stage."""
        for instruction in self.instructions:
            word, *arguments = shlex.split(instruction)
            if word == "COPY":
                options = [argument for argument in arguments if argument.startswith("--")]
                if options == ([f"--from={source}"] if source else []):
                    *paths, destination = arguments[len(options) :]
                    yield paths, destination

    def our_files(self, root: Path = ROOT) -> Iterator[tuple[Path, str]]:
        """Each file of ours that is copied by name, and where it is in the image."""
        for sources, destination in self.copies(FILES):
            for source in map(PurePosixPath, sources):
                [(folder, place)] = [one for one in PLACES.items() if source.is_relative_to(one[0])]
                file = (root if place == ROOT else place) / source.relative_to(folder)
                yield file, f"{destination}{file.name}" if destination.endswith("/") else destination


def stages(file: Path = FILE) -> dict[str, Stage]:
    """The stages by name."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    found = {}
    for part in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]:
        head, *instructions = (line.strip() for line in part.splitlines() if line.strip())
        base, name = head.split(" AS ")
        found[name] = Stage(name, base, tuple(instructions))
    return found


def lineage(known: dict[str, Stage], name: str) -> list[Stage]:
    """A stage and those it is made on; the last one's base is an image of somebody else."""
    found = [known[name]]
    while found[-1].base in known:
        found.append(known[found[-1].base])
    return found
