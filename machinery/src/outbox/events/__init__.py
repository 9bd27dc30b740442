"""The declared events: each a JSON Schema in the project's folder of events; see docs/events.md."""
