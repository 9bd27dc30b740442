"""A token server as an identity provider has one: OAuth 2.0 client credentials for signed tokens, and the keys."""

from __future__ import annotations

import base64
import json
import secrets
import ssl
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from outbox_lab.stack import ports

KEY_ID = "test"
AUDIENCE, OTHER_AUDIENCE = "kafka", "archive"
SCOPE, OTHER_SCOPE = "kafka.records", "archive.read"  # by which a client asks for an audience
AUDIENCES = {SCOPE: AUDIENCE, OTHER_SCOPE: OTHER_AUDIENCE}


@dataclass
class TokenServer:
    """HTTPS on loopback. It can be stopped and started again on its port; what it does may be changed meanwhile."""

    certificate: Path
    key: Path
    clients: dict[str, str]  # secrets by client id
    port: int = field(default_factory=lambda: ports.choose(0)[0])
    lifetime_s: float = 3600
    ahead_s: float = 0  # of its clock before ours
    issued: list[str] = field(default_factory=list)  # the clients that got a token, in order

    def __post_init__(self) -> None:
        self._signer = rsa.generate_private_key(65537, 2048)
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"https://{ports.LOOPBACK}:{self.port}/token"

    @property
    def keys_url(self) -> str:
        return f"https://{ports.LOOPBACK}:{self.port}/keys"

    def start(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, {"keys": [outer.public_key()]})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                if self.path != "/token":
                    return self.send_error(404)
                return self._answer(*outer.answer(self.headers.get("Authorization", ""), parse_qs(body)))

            def _answer(self, status: int, body: dict[str, Any]) -> None:
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        self._server = ThreadingHTTPServer((ports.LOOPBACK, self.port), Handler)
        # A handshake in the accepting thread would let one client that says nothing stop all others.
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        """Let the port refuse connections."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, authorization: str, form: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        """Status and body for a request of a token, in the words of RFC 6749."""
        client, _, secret = base64.b64decode(authorization.removeprefix("Basic ")).decode().partition(":")
        if not secrets.compare_digest(self.clients.get(client, ""), secret):
            return 401, {"error": "invalid_client", "error_description": "Invalid client or Invalid client credentials"}
        (scope,) = form.get("scope", [SCOPE])
        if form.get("grant_type") != ["client_credentials"]:
            return 400, {"error": "unsupported_grant_type"}
        if scope not in AUDIENCES:
            return 400, {"error": "invalid_scope", "error_description": f"Invalid scopes: {scope}"}
        self.issued.append(client)
        token = self.token(client, scope)
        return 200, {"access_token": token, "token_type": "Bearer", "expires_in": int(self.lifetime_s), "scope": scope}

    def token(self, client: str, scope: str = SCOPE) -> str:
        """A signed token, as RFC 7519 has it."""
        now = time.time() + self.ahead_s
        claims = {"iss": self.url, "aud": AUDIENCES[scope], "sub": client, "scope": scope}
        times = {"iat": int(now), "exp": int(now + self.lifetime_s)}
        head = {"alg": "RS256", "typ": "JWT", "kid": KEY_ID}
        signed = f"{_encoded(json.dumps(head).encode())}.{_encoded(json.dumps({**claims, **times}).encode())}"
        return f"{signed}.{_encoded(self._signer.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"

    def public_key(self) -> dict[str, str]:
        numbers = self._signer.public_key().public_numbers()
        parts = {"n": numbers.n, "e": numbers.e}
        encoded = {
            name: _encoded(value.to_bytes((value.bit_length() + 7) // 8, "big")) for name, value in parts.items()
        }
        return {"kty": "RSA", "use": "sig", "alg": "RS256", "kid": KEY_ID, **encoded}


def _encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
