"""The public API for a Flask service that writes events: one transaction a request, and Idempotency-Keys."""

from outbox.http.change import WriteHeaders
from outbox.http.problems import READING, WRITING, Kind, responses
from outbox.http.wsgi import SECURITY, Change, Service

__all__ = ["READING", "SECURITY", "WRITING", "Change", "Kind", "Service", "WriteHeaders", "responses"]
