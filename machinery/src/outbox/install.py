"""Install what a project runs on into its virtual environment, and pin it. The standard library is enough to run this.

    python -m outbox.install demo               the packages of a set, and the Java and jars that it needs
    python -m outbox.install lock [--upgrade]   pin the packages that the project itself names in pyproject.toml
    python -m outbox.install context FOLDER     write these sources where docker-compose takes them from

The Makefile of a project calls it. Every package is checked against a hash: the machinery's are in `requirements/`
beside this file, the project's own in its `requirements/own.txt`. They come from the index that pip is configured for;
no file names one. An installation that was interrupted is continued: its mark is written last.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = ("outbox", "outbox_lab")  # of the machinery, side by side
LOCKS = HERE / "requirements"
VENV = Path(sys.prefix)
OWN = Path("requirements", "own.txt")
PYTHON_MIN = "3.11"
FREE_DISK_MIN_GB = 4

# The sets of packages, and the extras of the machinery's pyproject.toml in each. All is tested with the first one, and
# the others have its versions.
SETS = {
    "machinery": [
        *("service", "service-fastapi", "page", "page-fastapi"),
        *("sink", "stack", "lakehouse", "iceberg", "msk", "otel", "testing", "dev", "machinery"),
    ],
    "dev": ["service", "page", "sink", "stack", "lakehouse", "otel", "testing", "dev"],
    "demo": ["service", "sink", "stack"],
    "service": ["service"],
    "dev-fastapi": ["service-fastapi", "page-fastapi", "sink", "stack", "lakehouse", "otel", "testing", "dev"],
    "demo-fastapi": ["service-fastapi", "sink", "stack"],
    "service-fastapi": ["service-fastapi"],
    "sink": ["sink"],
}
FLASK = "flask"  # the framework whose sets have no suffix

# pyspark comes as a source archive, 430 MB of jars. It is built with the pinned setuptools; to store the jars as they
# are, not compressed once more, takes a third of the time.
BUILD = (
    "--no-build-isolation-package=pyspark",
    "--config-settings-package=pyspark:--build-option=--compression=stored",
)
COMPILE = (
    *("--universal", "--generate-hashes", "--no-emit-index-url", "--no-emit-find-links", "--quiet"),
    *("--no-annotate", "--custom-compile-command", "make lock", "--python-version", PYTHON_MIN),
)

# What pip is configured for, in the words of uv, which reads no pip.conf.
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}


def main(command: str, *words: str) -> None:
    if command == "lock":
        lock(*words)
    elif command == "lock-machinery":
        lock_machinery(Path(words[0]), *words[1:])
    elif command == "context":
        write_context(Path(words[0]))
    else:
        install(command)


def of_project(name: str) -> str:
    """The set of this name with the framework of the project, which pyproject.toml names."""
    table = tomllib.loads(Path("pyproject.toml").read_text()).get("tool", {}).get("outbox", {})
    web = table.get("web", FLASK)
    return f"{name}-{web}" if web != FLASK and f"{name}-{web}" in SETS else name


def install(name: str) -> None:
    """Install a set and the project's own packages, then the Java and the jars."""
    name = of_project(name)
    say(f"installing the Python packages of the set `{name}` into {VENV.name}")
    own = ["-r", str(OWN)] if OWN.exists() else []
    # Whichever index has a package: the hashes decide what is accepted.
    options = ["--index-strategy=unsafe-best-match", "--require-hashes", *BUILD, "-r", str(LOCKS / f"{name}.txt"), *own]
    if not installed_from_cache(options):
        if shutil.disk_usage(VENV).free < FREE_DISK_MIN_GB * 1024**3:
            fail(f"less than {FREE_DISK_MIN_GB} GB of free disk", "free some: packages and JVM parts take 3 GB")
        uv("install", *options)
    for module in (["outbox.jvm.java"], ["outbox.jvm.jars", "kafka"]):
        command = [sys.executable, "-m", *module]
        if subprocess.run(command, env=environment(), stdout=subprocess.DEVNULL, check=False).returncode:
            sys.exit(1)
    for other in SETS:
        if set(SETS[of_project(other)]) <= set(SETS[name]):
            (VENV / other).touch()


def lock(*options: str) -> None:
    """Pin the packages that the project names, in versions that go with the machinery's."""
    versions = ["--constraints", str(LOCKS / f"{of_project('dev')}.txt")]
    uv("compile", *COMPILE, *options, *versions, "pyproject.toml", "-o", str(OWN))


def lock_machinery(folder: Path, *options: str) -> None:
    """Pin every set of the machinery, whose pyproject.toml is in this folder, for every system and supported Python."""
    first = next(iter(SETS))
    for name, extras in SETS.items():
        versions = [] if name == first else ["--constraints", str(LOCKS / f"{first}.txt")]
        chosen = [option for extra in extras for option in ("--extra", extra)]
        target = ["-o", str(LOCKS / f"{name}.txt")]
        uv("compile", *COMPILE, *options, *versions, *chosen, str(folder / "pyproject.toml"), *target)


def write_context(folder: Path) -> None:
    """Write the installed machinery where the images are built from, for a template that is a path of this machine."""
    shutil.rmtree(folder, ignore_errors=True)
    for package in PACKAGES:
        source = HERE.with_name(package)
        shutil.copytree(source, folder / "src" / package, ignore=shutil.ignore_patterns("__pycache__"))


def installed_from_cache(options: list[str]) -> bool:
    """Whether uv's cache has all packages, and they are installed from there: a second project needs no network.

    uv alone would trust its cache only as long as the index said: where a proxy takes such headers away, each
    installation downloads PySpark and makes its wheel again, 2.3 GB of disk and 25 CPU seconds.
    """
    command = ["pip", "install", "--offline", "--quiet", *options]
    return not subprocess.run(
        [VENV / "bin" / "uv", *command], env=environment(), stderr=subprocess.DEVNULL, check=False
    ).returncode


def uv(*arguments: str) -> None:
    """Run uv on the virtual environment, its progress shown as it is."""
    if subprocess.run([VENV / "bin" / "uv", "pip", *arguments], env=environment(), check=False).returncode:
        fail(
            "uv failed",
            "see above; check the network, then run make again. If a proxy has a certificate of its own, name its"
            " authority in SSL_CERT_FILE, or set UV_SYSTEM_CERTS=true",
        )


def environment() -> dict[str, str]:
    """Our environment and, for uv, what pip is configured for. It may hold passwords: never print it."""
    return {**as_uv(pip_configuration()), **os.environ, "VIRTUAL_ENV": str(VENV), "UV_PYTHON_DOWNLOADS": "never"}


def pip_configuration() -> dict[str, str]:
    """pip's options, by name, from its files and variables."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    names = ("global", "install", ":env:")  # the later one wins, as in pip
    sections: dict[str, dict[str, str]] = {name: {} for name in names}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in sections:
            sections[section][option] = ast.literal_eval(value)
    return {option: value for options in sections.values() for option, value in options.items()}


def as_uv(configuration: Mapping[str, str]) -> dict[str, str]:
    """The variables of uv for what pip is configured for."""
    return {
        variable: ("," if option == "find-links" else " ").join(configuration[option].split())
        for option, variable in UV_VARIABLES.items()
        if option in configuration
    }


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def fail(what: str, remedy: str) -> None:
    say(f"make: {what} — {remedy}")
    sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
