"""The public API for a service that writes events: Flask, one transaction a request, and Idempotency-Keys."""

from outbox.http.app import SECURITY
from outbox.http.problems import READING, WRITING, Kind, responses
from outbox.http.service import Change, Service, WriteHeaders

__all__ = ["READING", "SECURITY", "WRITING", "Change", "Kind", "Service", "WriteHeaders", "responses"]
