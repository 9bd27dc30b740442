"""Install the Python packages into .venv, and pin them. The standard library is enough to run it.

python bootstrap.py demo             install requirements/demo.txt; dev: also the tools of tests and benchmarks
python bootstrap.py lock [--upgrade] pin every set of packages again, or move it to the newest versions

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
INSTALLER = LOCKS / "bootstrap.txt"
PYTHON_MIN, PYTHON_MAX = (3, 11), (3, 13)
FREE_DISK_MIN_GB = 4

# The sets of packages, and the extras of pyproject.toml in each. A later set takes the versions of the first.
SETS = {
    "dev": ["service", "sink", "stack", "lakehouse", "dev"],
    "demo": ["service", "sink", "stack"],
    "service": ["service"],
    "sink": ["sink"],
}

# pyspark comes as a source archive of 430 MB of jars. Built with the pinned setuptools, and stored rather than
# compressed once more, it takes a third of the time.
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


def main(command, *options):
    require_python()
    make_venv()
    if command == "lock":
        lock(*options)
    else:
        install(command)


def install(name):
    if shutil.disk_usage(str(ROOT)).free < FREE_DISK_MIN_GB * 1024**3:
        fail("less than {} GB of free disk".format(FREE_DISK_MIN_GB), "free some: packages and JVM parts are 3 GB")
    say("installing the Python packages of requirements/{}.txt into .venv".format(name))
    # Any index may have them: the hashes decide what is taken.
    uv("install", "--index-strategy=unsafe-best-match", "--require-hashes", *BUILD, "-r", str(LOCKS / (name + ".txt")))
    uv("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    if subprocess.run(
        [str(PYTHON), "-m", "outbox.stack.jars", "kafka"], cwd=str(ROOT), stdout=subprocess.DEVNULL
    ).returncode:
        sys.exit(1)
    for other, extras in SETS.items():
        if set(extras) <= set(SETS[name]):
            (VENV / other).touch()


def lock(*options):
    """Write the lock files. Each has the wheels of every system and Python; none names an index."""
    same = ["--universal", "--generate-hashes", "--no-emit-index-url", "--no-emit-find-links", "--quiet", *options]
    same += ["--custom-compile-command", "make lock", "--python-version", "{}.{}".format(*PYTHON_MIN)]
    uv("compile", *same, "--group", "bootstrap", "-o", "requirements/bootstrap.txt")
    for name, extras in SETS.items():
        versions = [] if name == "dev" else ["--constraints", "requirements/dev.txt"]
        chosen = [option for extra in extras for option in ("--extra", extra)]
        uv("compile", *same, *versions, *chosen, "pyproject.toml", "-o", "requirements/{}.txt".format(name))


def require_python():
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


def make_venv():
    """The virtual environment, with uv and what it builds with in it."""
    if not PYTHON.exists():
        venv.create(str(VENV), with_pip=True, clear=True)
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "-q", "install", "--require-hashes"]
    if subprocess.run([*pip, "-r", str(INSTALLER)]).returncode:
        fail("pip could not install uv", "see above; check the network, then run make again")


def uv(*arguments):
    """Run uv on the virtual environment. Its progress is seen as it is."""
    done = subprocess.run(
        [str(VENV / "bin" / "uv"), "pip", *arguments],
        cwd=str(ROOT),
        env={**pip_index(), **os.environ, "VIRTUAL_ENV": str(VENV), "UV_PYTHON_DOWNLOADS": "never"},
    )
    if done.returncode:
        fail(
            "uv could not install or resolve the packages",
            "see above; check the network, then run make again (behind a proxy with a certificate of its own:"
            " SSL_CERT_FILE=… or UV_SYSTEM_CERTS=true)",
        )


def pip_index():
    """Where pip is configured to take packages from, as variables of uv. May hold a password: never shown."""
    listed = subprocess.run(
        [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "config", "list"],
        stdout=subprocess.PIPE,
        universal_newlines=True,
        check=True,
    )
    configured = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in ("global", "install", ":env:") and option in UV_VARIABLES:
            configured[section, option] = ast.literal_eval(value)
    found = {}
    for section in ("global", "install", ":env:"):  # the later one wins, as in pip
        found.update({option: value for (where, option), value in configured.items() if where == section})
    if "find-links" in found:
        found["find-links"] = ",".join(found["find-links"].split())
    return {UV_VARIABLES[option]: value for option, value in found.items()}


def say(line):
    print(line, file=sys.stderr, flush=True)


def fail(what, remedy):
    say("make: {} — {}".format(what, remedy))
    sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
