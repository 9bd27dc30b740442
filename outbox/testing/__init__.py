"""The public API for a project's tests (docs/reference.md). It needs pytest and hypothesis: the extra `testing`."""
