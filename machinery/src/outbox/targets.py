"""The public API for targets that are functions (docs/targets.md)."""

from outbox.sink.applying.function import newest

__all__ = ["newest"]
