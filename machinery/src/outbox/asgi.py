"""The public API for a FastAPI service that writes events: one transaction a request, and Idempotency-Keys."""

from outbox.http.asgi import READING, SECURITY, WRITING, Change, Service, WriteHeaders
from outbox.http.problems import Kind, responses

__all__ = ["READING", "SECURITY", "WRITING", "Change", "Kind", "Service", "WriteHeaders", "responses"]
