"""Install the Python packages into .venv, and pin them. The standard library is enough to run it.

python bootstrap.py demo               install requirements/demo.txt; `dev` adds what tests and benchmarks need
python bootstrap.py lock [--upgrade]   pin every set of packages again; --upgrade moves to the newest versions

Every package is checked against a hash in requirements/. It comes from the index that pip is configured for; no file
of this project names one. An installation that was interrupted is continued: its mark is written last.
"""

import ast
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCKS = ROOT / "requirements"
PYTHON_MIN, PYTHON_MAX = (3, 11), (3, 13)
FREE_DISK_MIN_GB = 4

# The sets of packages, and the extras of pyproject.toml in each. The others take their versions from the first.
SETS = {
    "dev": ["service", "sink", "stack", "lakehouse", "dev"],
    "demo": ["service", "sink", "stack"],
    "service": ["service"],
    "sink": ["sink"],
}

# pyspark comes as a source archive, 430 MB of jars. It is built with the pinned setuptools; to store the jars as they
# are, not compressed once more, takes a third of the time.
BUILD = [
    "--no-build-isolation-package=pyspark",
    "--config-settings-package=pyspark:--build-option=--compression=stored",
]

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


def main(command: str, *options: str) -> None:
    require_python()
    make_venv()
    if command == "lock":
        lock(*options)
    else:
        install(command)


def install(name: str) -> None:
    if shutil.disk_usage(str(ROOT)).free < FREE_DISK_MIN_GB * 1024**3:
        fail("less than {} GB of free disk".format(FREE_DISK_MIN_GB), "free some: packages and JVM parts take 3 GB")
    say("installing the Python packages of requirements/{}.txt into .venv".format(name))
    # Whichever index has a package: the hashes decide what is accepted.
    uv("install", "--index-strategy=unsafe-best-match", "--require-hashes", *BUILD, "-r", str(LOCKS / (name + ".txt")))
    uv("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT / "machinery"))
    for module in (["outbox.jvm.java"], ["outbox.jvm.jars", "kafka"]):
        command = [str(PYTHON), "-m", *module]
        if subprocess.run(command, cwd=str(ROOT), env=environment(), stdout=subprocess.DEVNULL).returncode:
            sys.exit(1)
    for other, extras in SETS.items():
        if set(extras) <= set(SETS[name]):
            (VENV / other).touch()


def lock(*options: str) -> None:
    """Write the lock files, each for every system and supported Python."""
    same = ["--universal", "--generate-hashes", "--no-emit-index-url", "--no-emit-find-links", "--quiet", *options]
    same += ["--no-annotate"]  # an annotation names this project
    same += ["--custom-compile-command", "make lock", "--python-version", "{}.{}".format(*PYTHON_MIN)]
    uv("compile", *same, "--group", "bootstrap", "-o", "requirements/bootstrap.txt")
    for name, extras in SETS.items():
        versions = [] if name == "dev" else ["--constraints", "requirements/dev.txt"]
        chosen = [option for extra in extras for option in ("--extra", extra)]
        uv("compile", *same, *versions, *chosen, "machinery/pyproject.toml", "-o", "requirements/{}.txt".format(name))


def require_python() -> None:
    found = sys.version_info[:2]
    if not PYTHON_MIN <= found <= PYTHON_MAX:
        fail(
            "this is Python {}.{}, and 3.11, 3.12 or 3.13 is needed".format(*found),
            "install one (Debian, Ubuntu: apt-get install python3.11-venv; macOS: brew install python@3.12)"
            " and run make PYTHON=python3.11 …",
        )
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        fail("this Python cannot make virtual environments", "apt-get install python3-venv")


def make_venv() -> None:
    """The virtual environment, with uv in it and what builds packages."""
    if not PYTHON.exists():
        venv.create(str(VENV), with_pip=True, clear=True)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "-q", "install", "--require-hashes"]
    if subprocess.run([*pip, "-r", str(LOCKS / "bootstrap.txt")]).returncode:
        fail("pip could not install uv", "see above; check the network, then run make again")


def uv(*arguments: str) -> None:
    """Run uv on the virtual environment, its progress shown as it is."""
    if subprocess.run([str(VENV / "bin" / "uv"), "pip", *arguments], cwd=str(ROOT), env=environment()).returncode:
        fail(
            "uv failed",
            "see above; check the network, then run make again. If a proxy has a certificate of its own, name its"
            " authority in SSL_CERT_FILE, or set UV_SYSTEM_CERTS=true",
        )


def environment() -> "dict[str, str]":
    """Our environment and, for uv, what pip is configured for. It may hold passwords: never print it."""
    return {**as_uv(pip_configuration()), **os.environ, "VIRTUAL_ENV": str(VENV), "UV_PYTHON_DOWNLOADS": "never"}


def pip_configuration() -> "dict[str, str]":
    """pip's options, by name, from its files and variables."""
    listed = subprocess.run(
        [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "config", "list"],
        stdout=subprocess.PIPE,
        universal_newlines=True,
        check=True,
    )
    names = ("global", "install", ":env:")  # the later one wins, as in pip
    sections: "dict[str, dict[str, str]]" = {name: {} for name in names}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in sections:
            sections[section][option] = ast.literal_eval(value)
    return {option: value for options in sections.values() for option, value in options.items()}


def as_uv(configuration: "dict[str, str]") -> "dict[str, str]":
    """The variables of uv for what pip is configured for."""
    return {
        variable: ("," if option == "find-links" else " ").join(configuration[option].split())
        for option, variable in UV_VARIABLES.items()
        if option in configuration
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fail(what: str, remedy: str) -> None:
    say("make: {} — {}".format(what, remedy))
    sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
