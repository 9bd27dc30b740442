"""Make the virtual environment: what `make` runs first. Standard library only, and readable by an older Python.

What is there and current stays. Interrupted, it starts again where it was: the mark is written last.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
MARK = VENV / "installed"
PYTHON_SUPPORTED = (3, 11)
JAVA_SUPPORTED = (17, 21)


def main():
    require_python()
    require_java()
    if shutil.disk_usage(str(ROOT)).free < 3 * 1024**3:
        fail("less than 3 GB of free disk", "make room: packages take 1.2 GB, the JVM parts 0.1 GB, data the rest")
    say("installing the Python packages of requirements.txt into .venv: about 700 MB to download, once a clone")
    venv.create(str(VENV), with_pip=True, clear=not (VENV / "bin" / "python").exists())
    pip("install", "--use-pep517", "--require-hashes", "-r", str(ROOT / "requirements.txt"))
    pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    if subprocess.run(
        [str(VENV / "bin" / "python"), "-m", "outbox.jvm.jars", "kafka"], stdout=subprocess.DEVNULL
    ).returncode:
        sys.exit(1)
    MARK.touch()


def require_python():
    if sys.version_info < PYTHON_SUPPORTED:
        fail(
            "this is Python {}.{}, and 3.11 or newer is needed".format(*sys.version_info[:2]),
            "install it (Debian, Ubuntu: apt-get install python3.11-venv; macOS: brew install python@3.12)"
            " and run make PYTHON=python3.11 …",
        )
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        fail("this Python cannot make virtual environments", "apt-get install python3-venv")


def require_java():
    """The same rule as outbox/jvm/java.py, which needs the packages that are not there yet."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    remedy = (
        "install Java 17 (Debian, Ubuntu: apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17)"
        " or point JAVA_HOME to a Java 17 or 21"
    )
    if java is None or not Path(java).exists():
        fail("no Java found", remedy)
    told = subprocess.run([java, "-version"], stderr=subprocess.PIPE, universal_newlines=True).stderr
    version = re.search(r'version "(\d+)', told)
    if version is None or int(version.group(1)) not in JAVA_SUPPORTED:
        fail("{} is Java {}, and 17 or 21 is needed".format(java, version.group(1) if version else "?"), remedy)


def pip(*arguments):
    done = subprocess.run([str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q", *arguments])
    if done.returncode != 0:
        fail("pip could not install the packages", "see above; check the network, then run make again")


def say(line):
    print(line, file=sys.stderr, flush=True)


def fail(what, remedy):
    say("make: {} — {}".format(what, remedy))
    sys.exit(1)


if __name__ == "__main__":
    main()
