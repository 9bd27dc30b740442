"""The experiments of the articles on exactly-once delivery and the outbox, on the real parts: docs/experiments.md."""
