"""The public API for the tests of a project (docs/reference.md). It needs pytest and hypothesis: the extra `testing`."""
